// The sentence of health, and what this peer says of itself.

import { byId, el, fill, meter, setText, withCommands } from "./dom.js";
import { bytes, bits, count, inUnit, number, perNat, rate, span, NOT_KNOWN } from "./format.js";

const TINY = 1e6; // bytes of a round
const APART = { frozen: "frozen", behind: "behind the others", out: "left out of the run" };

let shown = null; // of the sentence and the notices

export function showHealth(now) {
  const section = byId("health");
  section.dataset.is = now.mood ?? "";
  setText(byId("health-word"), now.word);
  const notices = now.me?.notices ?? [];
  const said = [sentence(now), ...notices].join("\n");
  if (said === shown) return; // a command that is being copied stays
  shown = said;
  fill(byId("health-text"), withCommands(sentence(now)));
  fill(byId("notices"), notices.length ? el("ul", {}, notices.map((notice) => el("li", {}, withCommands(notice)))) : null);
}

function sentence(now) {
  return now.health.slice(now.health.indexOf(":") + 1).trim(); // all of it where it has no word
}

// Rows come with the status. These take more than the value of their field; null: no row.
const ROWS = {
  peer: ({ me }) => el("span", { class: "mono", title: me.peer }, me.short || NOT_KNOWN),
  state: (now) => why(now.me, now),
  round: ({ run }) => [run.rounds === null ? `${run.round}` : `${run.round} of ${run.rounds}`, run.seconds_left ? `, ${span(run.seconds_left)} left` : "",
    run.rounds ? meter(run.round / run.rounds, "plain", `round ${run.round} of ${run.rounds}`) : null],
  rounds_contributed: ({ me }) => contributed(me),
  sent_per_second: ({ me }) => speed(me.sent_per_second, me.max_upload),
  received_per_second: ({ me }) => speed(me.received_per_second, me.max_download),
  daily_upload: ({ me }) => (me.daily_upload ? [`${bytes(me.sent_today)} of ${bytes(me.daily_upload)} sent`, meter(me.sent_today / me.daily_upload, "plain", "share of today's upload that is used")] : null),
  written_today: ({ me }) => (me.written_today ? [me.max_writes ? `${bytes(me.written_today)} of ${bytes(me.max_writes)} written` : `${bytes(me.written_today)} written`,
    me.max_writes ? meter(me.written_today / me.max_writes, "plain", "share of today's writes to the disk") : null] : null),
  uplink_bits: ({ me }) => (me.uplink_bits ? `${uplink(me.uplink_bits, me)}, from the transfers made` : NOT_KNOWN),
  loss: ({ me }) => losses(me),
  reachability: ({ me }) => reached(me),
};

// What takes no time to send says little of the line.
export const uplink = (perSecond, me) => `${me.bytes_per_round < TINY ? "at least " : ""}${bits(perSecond)}`;

export function showPeer(now) {
  const { me } = now;
  const rows = now.rows.map(({ label, name, unit }) => [label, name in ROWS ? ROWS[name](now) : inUnit(now.me[name], unit)]);
  const told = rows.filter(([, value]) => value !== null && !(me.state === "replay" && value === NOT_KNOWN));
  fill(byId("me"), el("dl", {}, told.map(([label, value]) => [el("dt", {}, label), el("dd", {}, [value].flat())])));
}

function why(me, now) {
  if (!now.alive && !["left", "done", "replay"].includes(me.state)) return "gone: its process does not run any more";
  if (now.word in APART) return `${me.state}, and ${APART[now.word]}`;
  if (me.problem) return `${me.state}: ${me.problem}`;
  if (me.state === "waiting" && me.waiting_for.length) return `${me.state}, because ${me.waiting_for.join(", ")} ${me.waiting_for.length === 1 ? "has" : "have"} not offered yet`;
  if (me.stalled_by && me.stalled_seconds) return `${me.state}, stalled for ${span(me.stalled_seconds)}: ${me.stalled_by}`;
  if (me.state === "waiting" && now.word === "waiting") return `waiting, because ${sentence(now)}`;
  return me.state;
}

function contributed(me) {
  if (!me.rounds_seen) return "no round has ended yet";
  const share = me.rounds_contributed / me.rounds_seen;
  return [`to ${me.rounds_contributed} of the last ${me.rounds_seen}`, meter(share, share < 0.5 ? "late" : "", "share of rounds contributed to")];
}

function speed(now, cap) {
  if (typeof now !== "number") return NOT_KNOWN;
  return cap ? [`${rate(now)} of ${rate(cap)} allowed`, meter(now / cap, "plain", "share of the cap in use")] : `${rate(now)}, no cap`;
}

function losses(me) {
  const parts = [];
  if (me.loss !== null) parts.push(`training ${number(me.loss * perNat(me), 3)}`);
  if (me.held_out_loss !== null) parts.push(`held-out ${number(me.held_out_loss * perNat(me), 3)}`);
  return parts.length ? parts.join(", ") + (me.own_loop ? "" : ", bits per byte") : NOT_KNOWN;
}

function reached(me) {
  const list = [...(me.addresses ?? []), ...(me.relays ?? []).map((relay) => `through ${relay}`)];
  const silent = (me.silent_relays ?? []).map((relay) => `, relay ${relay} does not answer`).join("");
  const how = (me.reachability || NOT_KNOWN) + silent;
  if (!list.length) return how;
  return el("details", { "data-keep": "addresses" }, el("summary", {}, `${how}, ${count(list.length)} address${list.length === 1 ? "" : "es"}`), el("ul", { class: "mono" }, list.map((one) => el("li", {}, one))));
}
