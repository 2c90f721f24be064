// The strip of rounds: one bar each, as high as it took long, split into who was in it and who was late.

import { byId, el, fill, setText, svg } from "./dom.js";
import { clock, plural, span, NOT_KNOWN } from "./format.js";

const HEIGHT = 70, FOOT = 12;
let chosen = null; // the step of the round whose details are shown; null: the newest
let shown = new Map(); // step -> [key, list item]
let latest = null;

export function showRounds(part, peers) {
  latest = part;
  const strip = stripOf(part);
  const longest = usual(part.rounds.map((round) => round.seconds));
  const items = part.rounds.map((round, at) => item(round, part, longest, at === part.rounds.length - 1));
  const atEnd = strip.scrollLeft + strip.clientWidth >= strip.scrollWidth - 24;
  const kept = new Set(items);
  for (const node of [...strip.children]) if (!kept.has(node)) node.remove();
  items.forEach((node, at) => { if (strip.children[at] !== node) strip.insertBefore(node, strip.children[at] ?? null); });
  shown = new Map([...shown].filter(([, [, node]]) => kept.has(node)));
  if (atEnd && chosen === null) strip.scrollLeft = strip.scrollWidth;
  select();
}

export function showOpenRound(open) {
  const node = byId("open-round");
  if (!open) return setText(node, "");
  const parts = [`Round ${open.round} in progress: ${open.offers} of ${open.members} updates offered`];
  if (open.leader) parts.push(`led by ${open.leader}`);
  if (open.ballot) parts.push(`${plural(open.ballot, "leader")} passed over`);
  if (open.proposed) parts.push(open.votes === null ? "a record is proposed" : `${open.votes} of ${open.members} votes`);
  parts.push(`${span(open.seconds)} so far`);
  setText(node, parts.join(", "));
}

function stripOf(part) {
  let strip = byId("strip").querySelector("ol");
  if (!strip) {
    strip = el("ol", { class: "strip", "aria-label": "Rounds, oldest first; arrow keys move, Enter keeps one" });
    strip.addEventListener("keydown", move);
    fill(byId("strip"), strip, el("div", { class: "legend" }));
  }
  fill(byId("strip").querySelector(".legend"), part.rounds.some(isPair) ? [sample("r-in", "met a partner"), sample("r-alone", "taken alone")]
    : [sample("r-in", "updates in the round"), sample("r-late", "members that were not in it"), sample("r-me", "yours was in it"), sample("r-missed", "yours was not")],
  el("span", {}, "height: how long it took"));
  byId("strip").hidden = part.rounds.length === 0;
  return strip;
}

const isPair = (round) => round.disagreement !== undefined;
const sample = (is, text) => el("span", {}, svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, is === "r-me" || is === "r-missed" ? svg("circle", { class: is, cx: 13, cy: 6, r: 3.5 }) : svg("rect", { class: is, x: 6, y: 0, width: 12, height: 12 })), text);

// Bars are as high as the longest but a few: one stall of an hour must not flatten the others.
function usual(durations) {
  const known = durations.filter((value) => value !== null).sort((a, b) => a - b);
  return known.length ? known[Math.min(known.length - 1, Math.floor(0.95 * known.length))] : 1;
}

function item(round, part, longest, isNewest) {
  const height = round.seconds === null ? 0.3 : Math.max(0.06, Math.min(1, round.seconds / longest));
  const key = JSON.stringify([round, height.toFixed(2), isNewest]);
  const [before, node] = shown.get(round.step) ?? [];
  if (before === key) return node;
  const picture = bar(round, height);
  const made = node ?? el("li", {}, el("button", { type: "button", tabindex: -1 }));
  const button = made.firstChild;
  button.setAttribute("aria-label", sentence(round, part));
  button.replaceChildren(picture);
  button.onclick = () => { chosen = isNewest ? null : round.step; select(); };
  shown.set(round.step, [key, made]);
  return made;
}

function bar(round, share) {
  const all = round.contributors.length + round.late.length || 1;
  if (isPair(round)) return svg("svg", { viewBox: `0 0 14 ${HEIGHT + FOOT + 2}`, "aria-hidden": "true" }, svg("rect", { class: round.contributors.length ? "r-in" : "r-alone", x: 1, y: HEIGHT * (1 - share), width: 12, height: HEIGHT * share }));
  const height = share * HEIGHT, late = (round.late.length / all) * height;
  const picture = svg("svg", { viewBox: `0 0 14 ${HEIGHT + FOOT + 2}`, "aria-hidden": "true" },
    svg("rect", { class: "r-in", x: 1, y: HEIGHT - height + late, width: 12, height: height - late }),
    svg("rect", { class: "r-late", x: 1, y: HEIGHT - height, width: 12, height: late }));
  picture.append(svg("circle", { class: round.contributed ? "r-me" : "r-missed", cx: 7, cy: HEIGHT + 7, r: 3.5 }));
  return picture;
}

function sentence(round) {
  const who = isPair(round) ? (round.contributors.length ? "with a partner" : "taken alone") : `${round.contributors.length} of ${round.contributors.length + round.late.length} updates`;
  return `Round ${round.step}, ${who}, ${round.seconds === null ? "time not known" : span(round.seconds)}`;
}

function select() {
  const steps = latest.rounds.map((round) => round.step);
  if (chosen !== null && !steps.includes(chosen)) chosen = null;
  const step = chosen ?? steps.at(-1);
  for (const [each, [, node]] of shown) {
    const button = node.firstChild;
    button.setAttribute("aria-pressed", String(each === step));
    button.tabIndex = each === step ? 0 : -1;
  }
  const round = latest.rounds.find((one) => one.step === step);
  fill(byId("round"), round ? details(round) : el("p", { class: "quiet" }, "no round has ended yet"));
}

function move(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  const steps = latest.rounds.map((round) => round.step);
  const at = steps.indexOf(chosen ?? steps.at(-1));
  const to = Math.max(0, Math.min(steps.length - 1, at + by));
  chosen = to === steps.length - 1 ? null : steps[to];
  select();
  shown.get(steps[to])[1].firstChild.focus();
}

function details(round) {
  const names = (indexes) => (indexes.length ? indexes.slice(0, 12).map((at) => latest.names[at] ?? "?").join(", ") + (indexes.length > 12 ? ` and ${indexes.length - 12} more` : "") : "nobody");
  const rows = [
    ["Round", [`${round.step}`, round.t ? `, at ${clock(round.t)}` : "", round.epoch === undefined ? "" : `, epoch ${round.epoch}`]],
    round.record ? ["Commit", [el("code", {}, round.record), `, record ${round.round}`]] : null,
    ["Took", round.seconds === null ? NOT_KNOWN : span(round.seconds)],
    !isPair(round) ? ["In it", names(round.contributors) + (round.truncated ? " and more: the list was cut" : "")] : ["Partner", round.contributors.length ? names(round.contributors) : "none: taken alone"],
    !isPair(round) ? ["Not in it", round.truncated ? NOT_KNOWN : names(round.late)] : ["Apart by", round.disagreement === null ? NOT_KNOWN : `${(100 * round.disagreement).toFixed(2)} %`],
    !isPair(round) ? ["Leader", leader(round)] : null,
    !isPair(round) ? ["Votes", round.votes === undefined ? NOT_KNOWN : `${round.votes}, as proof that it is decided`] : null,
    round.sending === undefined && round.applying === undefined ? null : ["Sending", round.sending === undefined ? NOT_KNOWN : `${span(round.sending)}, until the others had this peer's update`],
    round.applying === undefined ? null : ["Applying", `${span(round.applying)}, the outer step`],
  ];
  return [el("dl", { class: "columns" }, rows.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, [value].flat())])), split(round)];
}

function leader(round) {
  if (round.leader === undefined) return NOT_KNOWN;
  const name = latest.names[round.leader] ?? "?";
  return round.ballot ? `${name}, after ${plural(round.ballot, "other")} ${round.ballot === 1 ? "was" : "were"} passed over` : `${name}, the first in line`;
}

// How this peer spent the time, where it told.
function split(round) {
  const parts = Object.entries(round.split ?? {}).filter(([, seconds]) => seconds > 0);
  const all = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!all) return null;
  let at = 0;
  const text = parts.map(([name, seconds]) => `${name} ${span(seconds)}`).join(", ");
  const picture = svg("svg", { class: "split", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": text });
  for (const [name, seconds] of parts) {
    const width = (100 * seconds) / all;
    picture.append(svg("rect", { class: name, x: at, y: 0, width, height: 10 }));
    at += width;
  }
  const key = (name) => svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("rect", { class: name, x: 6, y: 0, width: 12, height: 12 }));
  return el("div", {}, picture, el("div", { class: "legend" }, parts.map(([name, seconds]) => el("span", {}, key(name), `${name} ${span(seconds)}`))));
}
