// The sentence of health, and what this peer says of itself.

import { byId, el, fill, meter, setText } from "./dom.js";
import { bytes, bits, count, number, rate, span, NOT_KNOWN } from "./format.js";

const MOOD = { healthy: "ok", done: "ok", attention: "bad", gone: "bad", stalled: "bad", frozen: "bad", behind: "bad", out: "bad", late: "warn", shrunk: "warn", alone: "warn", looking: "warn", waiting: "warn" };
const APART = { frozen: "frozen", behind: "behind the others", out: "left out of the run" };

export function showHealth(now) {
  const section = byId("health");
  section.dataset.is = MOOD[now.word] ?? "";
  setText(byId("health-word"), now.word);
  setText(byId("health-text"), sentence(now));
  const notices = now.me?.notices ?? [];
  fill(byId("notices"), notices.length ? el("ul", {}, notices.map((notice) => el("li", {}, notice))) : null);
}

function sentence(now) {
  return now.health.slice(now.health.indexOf(":") + 1).trim(); // all of it where it has no word
}

export function showPeer(now) {
  const { me, run } = now;
  const rows = [
    ["Name", el("span", { class: "mono", title: me.peer }, me.short || NOT_KNOWN)],
    ["State", why(me, now)],
    ["Round", [run.rounds === null ? `${run.round}` : `${run.round} of ${run.rounds}`, run.seconds_left ? `, ${span(run.seconds_left)} left` : "",
      run.rounds ? meter(run.round / run.rounds, "plain", `round ${run.round} of ${run.rounds}`) : null]],
    ["Contributed", contributed(me)],
    ["Sends", speed(me.sent_per_second, me.max_upload)],
    ["Receives", speed(me.received_per_second, me.max_download)],
    me.daily_upload ? ["Today (UTC)", [`${bytes(me.sent_today)} of ${bytes(me.daily_upload)} sent`, meter(me.sent_today / me.daily_upload, "plain", "share of today's upload that is used")]] : null,
    ["Uplink", me.uplink_bits ? `${bits(me.uplink_bits)}, from the transfers made` : NOT_KNOWN],
    ["Loss", losses(me)],
    ["Reached", reached(me)],
    ["Version", me.library || NOT_KNOWN],
  ];
  fill(byId("me"), el("dl", {}, rows.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, [value].flat())])));
}

function why(me, now) {
  if (!now.alive && !["left", "done", "replay"].includes(me.state)) return "gone: its process does not run any more";
  if (now.word in APART) return `${me.state}, and ${APART[now.word]}`;
  if (me.problem) return `${me.state}: ${me.problem}`;
  if (me.waiting_for.length) return `${me.state}, because ${me.waiting_for.join(", ")} ${me.waiting_for.length === 1 ? "has" : "have"} not offered yet`;
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
  if (me.loss !== null) parts.push(`training ${number(me.loss)}`);
  if (me.held_out_loss !== null) parts.push(`held-out ${number(me.held_out_loss)}`);
  return parts.length ? parts.join(", ") + (me.own_loop ? "" : ", nats per token") : NOT_KNOWN;
}

function reached(me) {
  const list = [...(me.addresses ?? []), ...(me.relays ?? []).map((relay) => `through ${relay}`)];
  const how = me.reachability || NOT_KNOWN;
  if (!list.length) return how;
  return el("details", { "data-keep": "addresses" }, el("summary", {}, `${how}, ${count(list.length)} address${list.length === 1 ? "" : "es"}`), el("ul", { class: "mono" }, list.map((one) => el("li", {}, one))));
}
