// The swarm as this peer sees it: a graph of its own paths, and the same as a table.

import { byId, el, fill, svg } from "./dom.js";
import { bytes, clock, rate, span, NOT_KNOWN } from "./format.js";
import { uplink } from "./peer.js";

const SHOWN = 40; // peers in the graph; the table has all
const WIDTH = 520, HEIGHT = 320;
const FITS = 9; // characters of a name beside the circle, on a phone too; the table has it whole
const TIMED = 8; // peers whose answers are told on the lines: more stand on one another

export function showSwarm(peers, more) {
  const others = peers.filter((peer) => !peer.self).slice(0, SHOWN);
  const self = peers.find((peer) => peer.self);
  const label = `${peers.length + more} members: ` + others.map((peer) => `${peer.short} ${peer.presence}, ${peer.path ?? "path not known"}`).join("; ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const places = others.map((_, at) => place(at, others.length));
  others.forEach((peer, at) => drawing.append(...edge(peer, places[at], others.length)));
  others.forEach((peer, at) => drawing.append(...node(peer, places[at], others.length)));
  if (self) drawing.append(...node(self, { x: middle(others.length), y: HEIGHT / 2, side: 0 }, 1));
  const hidden = peers.length - others.length - (self ? 1 : 0) + more;
  fill(byId("graph"), peers.length ? drawing : el("p", { class: "quiet" }, "nobody is known here yet"), hidden ? el("p", { class: "quiet" }, `and ${hidden} more`) : null, peers.length ? legend() : null);
}

// The machines that are one replica with this peer, first to last.
export function showStages(stages) {
  byId("replica").hidden = !stages.length;
  const waits = (stage) => typeof stage.waits_for === "number";
  const items = stages.map((stage, place) => el("li", { "data-self": stage.self, "data-waited": stages.some((other) => other.waits_for === place) },
    el("span", { class: "mono", title: stage.peer }, stage.self ? `${stage.short} (you)` : stage.short),
    el("span", { class: "quiet" }, `stage ${place + 1} of ${stages.length}, ${fragments([stage.first, stage.stop])}`),
    waits(stage) ? el("span", {}, `waits for stage ${stage.waits_for + 1}`) : null));
  fill(byId("stages"), el("ol", { class: "stages" }, items));
}

const fragments = ([first, stop]) => (stop <= first ? "none yet" : stop - first === 1 ? `fragment ${first}` : `fragments ${first} to ${stop - 1}`);

const isGone = (peer) => peer.presence === "left" || peer.presence === "gone";

const middle = (many) => WIDTH / 2 - (many === 1 ? 75 : 0); // a pair stands in the middle

function place(at, many) {
  const angle = (2 * Math.PI * at) / many - (many === 1 ? 0 : many === 2 ? Math.PI : Math.PI / 2);
  const x = middle(many) + 150 * Math.cos(angle), y = HEIGHT / 2 + 96 * Math.sin(angle);
  return { x, y, side: Math.cos(angle) };
}

function edge(peer, to, many) {
  const from = { x: middle(many), y: HEIGHT / 2 };
  const line = svg("line", { class: "edge", x1: from.x, y1: from.y, x2: to.x, y2: to.y, "data-path": peer.path ?? "", "data-gone": isGone(peer) });
  if (many > TIMED || typeof peer.answers_in !== "number") return [line];
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
  const lines = peer.self ? ["you"] : peer.called ? [cut(peer.called), peer.letters] : [peer.letters];
  const y = below ? at.y + (up ? -20 : 28) : at.y + 4;
  const first = (lines.length - 1) * (below ? (up ? -1.15 : 0) : -0.6); // in heights of a line: a phone has larger letters
  const said = lines.map((line, number) => svg("tspan", { x, dy: `${number ? 1.15 : first}em` }, line));
  return [circle, svg("text", { x, y, "text-anchor": below ? "middle" : at.side > 0 ? "start" : "end" }, said)];
}

const cut = (name) => (name.length > FITS ? `${name.slice(0, FITS - 1)}…` : name);

function legend() {
  const sample = (path) => svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("line", { class: "edge", x1: 0, y1: 6, x2: 26, y2: 6, "data-path": path }));
  const dot = (attributes) => svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("circle", { class: "node", cx: 13, cy: 6, r: 4.5, ...attributes }));
  return el("div", { class: "legend" },
    el("span", {}, sample("direct"), "direct"), el("span", {}, sample("punched"), "punched"), el("span", {}, sample("relayed"), "relayed"),
    el("span", {}, dot({ "data-in": true }), "in the last round"), el("span", {}, dot({ "data-late": true }), "not in it"), el("span", {}, dot({ "data-gone": true }), "left or gone"));
}

const PRESENCE = { live: "ok", left: "", gone: "bad" };
const order = { by: null, down: false }; // of the table; null: you first, then who is missing
const missing = (peer) => (peer.self ? 0 : peer.in_last_round === false ? 1 : isGone(peer) ? 2 : 3);

// Columns: heading, what is shown, what it is sorted by (a number where the column is one).
const COLUMNS = (now) => [
  ["Peer", (peer) => el("span", { class: "mono", title: peer.peer }, peer.short + (peer.self ? " (you)" : "")), (peer) => peer.short],
  ["Is", (peer) => el("span", { class: "tag", "data-is": now.alive ? PRESENCE[peer.presence] ?? "" : "" }, now.alive || now.me.state === "replay" ? peer.presence : `was ${peer.presence}`), (peer) => peer.presence],
  ["Round", (peer) => peer.round ?? NOT_KNOWN, (peer) => peer.round ?? -1],
  ["Trains", (peer) => (peer.trains ? fragments(peer.trains) : ""), (peer) => (peer.trains ? peer.trains[0] : -1)],
  [now.gossips ? "Met last" : "In last round", (peer) => (peer.in_last_round === null ? (now.gossips ? "no" : "no round yet") : peer.in_last_round ? "yes" : "no"), (peer) => String(peer.in_last_round)],
  ["Path", (peer) => (peer.self ? "" : path(peer)), (peer) => peer.path ?? ""],
  ["Answers in", (peer) => (peer.self ? "" : span(peer.answers_in)), (peer) => peer.answers_in ?? -1],
  ["Uplink", (peer) => (peer.self ? "" : peer.uplink_bits ? uplink(peer.uplink_bits, now.me) : NOT_KNOWN), (peer) => peer.uplink_bits ?? -1],
  ["Sent to", (peer) => (peer.self ? "" : moved(peer.bytes_sent, peer.sent_per_second)), (peer) => peer.bytes_sent ?? -1],
  ["Received from", (peer) => (peer.self ? "" : moved(peer.bytes_received, peer.received_per_second)), (peer) => peer.bytes_received ?? -1],
  ["Last seen", (peer) => (peer.self ? "" : typeof peer.seen !== "number" ? NOT_KNOWN : now.alive ? `${span(peer.seen)} ago` : clock(now.updated - peer.seen)), (peer) => peer.seen ?? -1],
];

export function showTable(now) {
  const { peers, more_peers: more } = now;
  const told = (shows) => peers.some((peer) => ![NOT_KNOWN, ""].includes(shows(peer)));
  const columns = COLUMNS(now).filter(([, shows]) => !peers.length || told(shows)); // of a replay much is in no file
  const by = columns.find(([name]) => name === order.by);
  const rows = [...peers].sort((one, other) => (by ? (order.down ? -1 : 1) * compare(by[2](one), by[2](other)) : missing(one) - missing(other)));
  const numeric = ([, , value]) => (peers.length && typeof value(peers[0]) === "number" ? "n" : null);
  const head = columns.map((column) => el("th", { class: numeric(column), scope: "col", "aria-sort": order.by === column[0] ? (order.down ? "descending" : "ascending") : null }, heading(column[0], now)));
  const focused = document.activeElement?.dataset?.column; // a redraw comes every second
  const body = rows.map((peer) => el("tr", {}, columns.map((column) => el("td", { class: numeric(column) }, column[1](peer)))));
  fill(byId("peers"), el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)), more ? el("p", { class: "quiet" }, `and ${more} more: decentral peers lists all`) : null);
  if (focused) document.querySelector(`.sort[data-column="${focused}"]`)?.focus();
}

const compare = (one, other) => (typeof one === "number" ? one - other : String(one).localeCompare(String(other)));

function heading(name, now) {
  const button = el("button", { type: "button", class: "sort", "data-column": name }, name);
  button.addEventListener("click", () => {
    [order.by, order.down] = order.by !== name ? [name, false] : order.down ? [null, false] : [name, true];
    showTable(now);
  });
  return button;
}

function path(peer) {
  const relayed = peer.relayed_share ? `, ${Math.round(100 * peer.relayed_share)} % relayed` : "";
  return peer.path ? peer.path + relayed : NOT_KNOWN;
}

const moved = (total, now) => (typeof total !== "number" ? NOT_KNOWN : bytes(total) + (typeof now === "number" ? `, ${rate(now)}` : ""));
