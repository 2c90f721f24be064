// What it costs: beside a float32 all-reduce at every step, per peer, per kind of message.

import { byId, el, fill, meter } from "./dom.js";
import { bytes, count, NOT_KNOWN } from "./format.js";

const SHOWN = 6; // peers, those with the most

export function showBytes(now) {
  const cost = now.bytes, peers = now.peers.filter((peer) => !peer.self);
  const moved = (peer) => (peer.bytes_sent ?? 0) + (peer.bytes_received ?? 0);
  const most = Math.max(1, ...peers.map(moved));
  fill(byId("bytes"),
    el("div", { class: "pair" }, big(bytes(cost.sent), "sent"), big(bytes(cost.received), "received"), big(times(cost), "fewer than all-reduce")),
    el("p", { class: "quiet" }, against(cost)),
    el("h3", {}, "With each peer"),
    peers.length ? el("dl", {}, [...peers].sort((a, b) => moved(b) - moved(a)).slice(0, SHOWN).map((peer) => [
      el("dt", { class: "mono" }, peer.short),
      el("dd", {}, typeof peer.bytes_sent === "number" ? [`${bytes(peer.bytes_sent)} to, ${bytes(peer.bytes_received)} from`, meter(moved(peer) / most, "plain", "share of the most")] : NOT_KNOWN),
    ])) : el("p", { class: "quiet" }, "nobody yet"),
    peers.length > SHOWN ? el("p", { class: "quiet" }, `and ${peers.length - SHOWN} more in the table`) : null,
    el("h3", {}, "By kind of message"),
    kinds(cost.kinds));
}

const big = (value, what) => el("div", {}, el("div", { class: "big" }, value), el("div", { class: "quiet" }, what));
const times = (cost) => (cost.dense && cost.sent ? `${count(Math.round(cost.dense / cost.sent))} ×` : "?");

function against(cost) {
  if (!cost.dense) return "what a float32 all-reduce at every step would have sent is not known here";
  return `a float32 all-reduce of ${count(cost.num_parameters)} parameters at every step would have sent ${bytes(cost.dense)} from here`;
}

function kinds(list) {
  if (!list?.length) return el("p", { class: "quiet" }, NOT_KNOWN);
  const most = Math.max(1, ...list.map((kind) => kind.sent + kind.received));
  return el("dl", {}, list.map((kind) => [el("dt", {}, kind.name), el("dd", {}, `${bytes(kind.sent)} sent, ${bytes(kind.received)} received`, meter((kind.sent + kind.received) / most, "plain", "share of the most"))]));
}
