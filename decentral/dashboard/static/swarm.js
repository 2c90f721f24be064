// The swarm as this peer sees it: a graph of its own paths, and the same as a table.

import { byId, el, fill, svg } from "./dom.js";
import { bits, bytes, rate, span, NOT_KNOWN } from "./format.js";

const SHOWN = 40; // peers in the graph; the table has all
const WIDTH = 520, HEIGHT = 300;

export function showSwarm(peers, more) {
  const others = peers.filter((peer) => !peer.self).slice(0, SHOWN);
  const self = peers.find((peer) => peer.self);
  const label = `${peers.length + more} members: ` + others.map((peer) => `${peer.short} ${peer.presence}, ${peer.path ?? "path not known"}`).join("; ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const places = others.map((_, at) => place(at, others.length));
  others.forEach((peer, at) => drawing.append(...edge(peer, places[at], others.length)));
  others.forEach((peer, at) => drawing.append(...node(peer, places[at], others.length)));
  if (self) drawing.append(...node(self, { x: WIDTH / 2, y: HEIGHT / 2, side: 0 }, 1));
  const hidden = peers.length - others.length - (self ? 1 : 0) + more;
  fill(byId("graph"), peers.length ? drawing : el("p", { class: "quiet" }, "nobody is known here yet"), hidden ? el("p", { class: "quiet" }, `and ${hidden} more`) : null, peers.length ? legend() : null);
}

const isGone = (peer) => peer.presence === "left" || peer.presence === "gone";

function place(at, many) {
  const angle = (2 * Math.PI * at) / many - (many === 1 ? 0 : many === 2 ? Math.PI : Math.PI / 2);
  const x = WIDTH / 2 + 160 * Math.cos(angle), y = HEIGHT / 2 + 108 * Math.sin(angle);
  return { x, y, side: Math.cos(angle) };
}

function edge(peer, to, many) {
  const from = { x: WIDTH / 2, y: HEIGHT / 2 };
  const line = svg("line", { class: "edge", x1: from.x, y1: from.y, x2: to.x, y2: to.y, "data-path": peer.path ?? "", "data-gone": isGone(peer) });
  if (many > 12 || typeof peer.answers_in !== "number") return [line];
  const x = from.x + 0.52 * (to.x - from.x), y = from.y + 0.52 * (to.y - from.y) - 5;
  return [line, svg("text", { class: "quiet", x, y, "text-anchor": "middle" }, span(peer.answers_in))];
}

function node(peer, at, many) {
  const small = many > 16;
  const circle = svg("circle", { class: "node", cx: at.x, cy: at.y, r: small ? 7 : 12, "data-in": peer.in_last_round === true, "data-late": peer.in_last_round === false, "data-gone": isGone(peer), "data-self": peer.self });
  if (small && !peer.self) return [circle];
  const below = at.side === 0 || Math.abs(at.side) < 0.7;
  const up = at.y < HEIGHT / 2 && !peer.self;
  const x = below ? at.x : at.x + Math.sign(at.side) * 18;
  const y = below ? at.y + (up ? -20 : 28) : at.y + 4;
  return [circle, svg("text", { x, y, "text-anchor": below ? "middle" : at.side > 0 ? "start" : "end" }, peer.self ? "you" : peer.short)];
}

function legend() {
  const sample = (path) => svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("line", { class: "edge", x1: 0, y1: 6, x2: 26, y2: 6, "data-path": path }));
  const dot = (attributes) => svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("circle", { class: "node", cx: 13, cy: 6, r: 4.5, ...attributes }));
  return el("div", { class: "legend" },
    el("span", {}, sample("direct"), "direct"), el("span", {}, sample("punched"), "punched"), el("span", {}, sample("relayed"), "relayed"),
    el("span", {}, dot({ "data-in": true }), "in the last round"), el("span", {}, dot({ "data-late": true }), "not in it"), el("span", {}, dot({ "data-gone": true }), "left or gone"));
}

const PRESENCE = { live: "ok", left: "", gone: "bad" };

export function showTable(peers, gossips, more) {
  const head = ["Peer", "Is", "Round", gossips ? "Met last" : "In last round", "Path", "Answers in", "Uplink", "Sent to", "Received from", "Last seen"];
  const numeric = new Set([2, 5, 6, 7, 8, 9]);
  const row = (peer) => [
    el("span", { class: "mono", title: peer.peer }, peer.short + (peer.self ? " (you)" : "")),
    el("span", { class: "tag", "data-is": PRESENCE[peer.presence] ?? "" }, peer.presence),
    peer.round ?? "?",
    peer.in_last_round === null ? (gossips ? "no" : "no round yet") : peer.in_last_round ? "yes" : "no",
    peer.self ? "" : path(peer),
    peer.self ? "" : span(peer.answers_in),
    peer.self ? "" : peer.uplink_bits ? bits(peer.uplink_bits) : NOT_KNOWN,
    peer.self ? "" : moved(peer.bytes_sent, peer.sent_per_second),
    peer.self ? "" : moved(peer.bytes_received, peer.received_per_second),
    peer.self ? "" : typeof peer.seen === "number" ? `${span(peer.seen)} ago` : NOT_KNOWN,
  ];
  const cell = (tag, at, content) => el(tag, { class: numeric.has(at) ? "n" : null, scope: tag === "th" ? "col" : null }, content);
  const body = peers.map((peer) => el("tr", {}, row(peer).map((content, at) => cell("td", at, content))));
  fill(byId("peers"), el("table", {}, el("thead", {}, el("tr", {}, head.map((name, at) => cell("th", at, name)))), el("tbody", {}, body)), more ? el("p", { class: "quiet" }, `and ${more} more: decentral peers lists all`) : null);
}

function path(peer) {
  const relayed = peer.relayed_share ? `, ${Math.round(100 * peer.relayed_share)} % relayed` : "";
  return (peer.path ?? NOT_KNOWN) + relayed;
}

const moved = (total, now) => (typeof total !== "number" ? NOT_KNOWN : bytes(total) + (typeof now === "number" ? `, ${rate(now)}` : ""));
