// Gets the parts, from a stream or for one round of a replay, and gives each to what shows it.

import { byId, el, fill, setText } from "./dom.js";
import { bytes, count, moment, plural, span } from "./format.js";
import { showBytes } from "./bytes.js";
import { showEvents } from "./events.js";
import { redraw, showFigures, showLearning } from "./learning.js";
import { showHealth, showPeer } from "./peer.js";
import { Slider } from "./replay.js";
import { showOpenRound, showRounds } from "./rounds.js";
import { showStages, showSwarm, showTable } from "./swarm.js";

const query = new URLSearchParams(location.search);
const open = new Set(); // details that somebody opened: parts are drawn anew every second
let stream = null, slider = null, asked = 0;

const show = {
  page(page) {
    setText(byId("version"), `decentral ${page.version}`);
    const names = page.folders.map((folder) => folder.name);
    byId("folders").hidden = names.length < 2;
    const select = byId("folder");
    if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) fill(select, names.map((name) => el("option", { value: name }, name)));
    if (document.activeElement !== select) select.value = page.folder ?? "";
    if (page.replay) {
      slider ??= new Slider((round) => ask(round));
      slider.show(page.replay, slider.asked);
    }
  },
  now(now) {
    showHealth(now);
    byId("main").dataset.known = String(Boolean(now.me));
    for (const card of document.querySelectorAll(".grid")) card.hidden = !now.me;
    if (!now.me) return;
    setText(byId("run-name"), now.run.name || "decentral");
    setText(byId("run-what"), now.run.algorithm);
    setText(byId("run-line"), runLine(now));
    showSample(now.sample);
    document.title = `${now.word} · ${now.run.name || "decentral"}`;
    showPeer(now);
    showSwarm(now.peers, now.more_peers);
    showStages(now.stages ?? []);
    showTable(now);
    if (!now.alive && !slider) link("", `ended, as of ${moment(now.updated)}`);
    else if (stream?.readyState === EventSource.OPEN) link("live", "connected");
    showOpenRound(now.open);
    showFigures(now);
    showBytes(now);
    for (const details of document.querySelectorAll("details[data-keep]")) {
      details.open = open.has(details.dataset.keep);
      details.addEventListener("toggle", () => (details.open ? open.add(details.dataset.keep) : open.delete(details.dataset.keep)));
    }
  },
  rounds: showRounds,
  learning: showLearning,
  events: showEvents,
};

// What is learnt, how far it is and when it ends, and what this peer gave.
function runLine({ run, me, what }) {
  const far = run.rounds === null ? `round ${run.round}` : `round ${run.round} of ${run.rounds}`;
  const end = run.seconds_left ? `about ${span(run.seconds_left)} left` : null;
  const gave = me.inner_steps ? `you gave ${gift(me)}` : null;
  return [what, far, end, gave].filter(Boolean).join(" · ");
}

// What the model says after a few words of held-out text.
function showSample({ prompt, text, round }) {
  byId("says").hidden = !text;
  if (text) fill(byId("says"), el("span", { class: "quiet" }, `The model after round ${round}: `), el("q", {}, el("span", { class: "quiet" }, text.startsWith(prompt) ? prompt : ""), text.startsWith(prompt) ? text.slice(prompt.length) : text));
}

// Over all lives of the peer; one of an older version tells the steps alone.
function gift(me) {
  const steps = plural(count(me.inner_steps), "step", me.inner_steps);
  if (!me.given_seconds) return `${steps}, ${bytes(me.bytes_sent)} sent`;
  const share = typeof me.given_share === "number" ? `: ${Number((100 * me.given_share).toPrecision(3))} % of the run` : "";
  return `${plural(count(me.given_rounds), "round", me.given_rounds)}, ${steps}, ${span(me.given_seconds)}, ${bytes(me.given_bytes)} sent${share}`;
}

function take(parts) {
  for (const [part, value] of Object.entries(parts)) show[part]?.(value);
}

function link(is, text) {
  byId("link").dataset.is = is;
  setText(byId("link"), text);
}

async function ask(round) {
  const number = ++asked;
  const parameters = new URLSearchParams(query);
  if (round !== undefined) parameters.set("round", round);
  const answer = await fetch(`api/view?${parameters}`);
  if (!answer.ok) throw new Error(await answer.text());
  const parts = await answer.json();
  if (number !== asked) return parts; // the slider has gone on
  if (slider && round !== undefined) delete parts.page;
  take(parts);
  return parts;
}

function follow() {
  stream = new EventSource(`api/stream?${query}`);
  stream.onopen = () => link("live", "connected");
  stream.onerror = () => {
    link("lost", "not reached, trying again");
    if (stream.readyState !== EventSource.CLOSED) return;
    setTimeout(follow, 5000); // refused: too many look, or the token is another one now
  };
  for (const part of Object.keys(show)) stream.addEventListener(part, (event) => show[part](JSON.parse(event.data)));
}

byId("folder").addEventListener("change", (event) => {
  query.set("peer", event.target.value);
  location.search = query.toString();
});
byId("over").addEventListener("change", redraw);
byId("replay").addEventListener("submit", (event) => event.preventDefault());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

try {
  const parts = await ask();
  if (!parts.page.live) link("", "replay");
  else follow();
} catch (error) {
  link("lost", `not reached: ${error.message}`);
  setTimeout(() => location.reload(), 5000);
}
