// Charts, by uPlot: held-out loss and training loss over what they cost, and how the peers' updates agree.

import { byId, el, fill } from "./dom.js";
import { bytes, count, number, perNat, span } from "./format.js";

const OVER = { round: "round", tokens: "tokens of this peer", bytes_sent: "sent by this peer", seconds: "time", step: "inner step", diagnosed_round: "round" };
const charts = new Map(); // key -> Chart
let latest = null, figures = [], owner = { own_loop: true };

export function showLearning(part) {
  latest = part;
  const over = byId("over").value;
  const host = byId("learning");
  draw(host, "held-out", "Held-out loss, bits per byte", part.held_out, over, "bits_per_byte", "not evaluated yet");
  const available = part.training[over] ? over : "step";
  const loss = part.training.loss.map((value) => (value === null ? null : value * perNat(owner)));
  draw(host, "training", `Training loss of this peer${owner.own_loop ? "" : ", bits per byte"}`, { ...part.training, loss }, available, "loss", "no step yet");
  for (const [name, title] of Object.entries(part.titles)) {
    if (part.diagnostics[name].some((value) => value !== null)) draw(byId("diagnostics"), name, title, part.diagnostics, "diagnosed_round", name, "", true);
  }
}

export function showFigures(now) {
  if (owner.own_loop !== now.me.own_loop) {
    owner = now.me;
    charts.get("training")?.drop();
    charts.delete("training");
    if (latest) showLearning(latest);
  }
  figures = now.diagnostics ?? [];
  for (const figure of figures) charts.get(figure.name)?.say(figure.out ? "out of its band" : "");
  if (!charts.has("none") && !figures.length && !byId("diagnostics").children.length) fill(byId("diagnostics"), el("p", { class: "quiet" }, "no round told of it yet"));
}

export function redraw() {
  for (const chart of charts.values()) chart.remake();
  if (latest) showLearning(latest);
}

function draw(host, key, title, columns, x, y, empty, small = false) {
  if (!charts.has(key)) {
    if (host.firstChild?.tagName === "P") fill(host);
    charts.set(key, new Chart(host, title, small));
  }
  const keep = columns[y].map((value, at) => value !== null && columns[x][at] !== null);
  charts.get(key).show(columns[x].filter((_, at) => keep[at]), columns[y].filter((_, at) => keep[at]), x, empty);
}

const tick = (x) => ({
  tokens: (value) => (value >= 1e6 ? `${+(value / 1e6).toFixed(2)}M` : value >= 1e3 ? `${+(value / 1e3).toFixed(1)}k` : `${value}`),
  bytes_sent: (value) => (value === 0 ? "0" : bytes(value)),
  seconds: (value) => (value === 0 ? "0" : value < 7200 ? `${+(value / 60).toFixed(1)} min` : `${+(value / 3600).toFixed(1)} h`),
}[x] ?? ((value) => count(value)));

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Chart {
  constructor(host, title, small) {
    this.small = small;
    this.value = el("b");
    this.note = el("span", { class: "quiet" });
    this.canvas = el("div", { role: "img" });
    this.figure = el("figure", {}, el("figcaption", {}, `${title}: `, this.value, " ", this.note), this.canvas);
    this.title = title;
    host.append(this.figure);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.canvas);
  }

  size() { return { width: Math.max(120, this.canvas.clientWidth), height: this.small ? 110 : 220 }; }
  say(text) { this.note.textContent = text; }
  remake() { this.plot?.destroy(); this.plot = null; }
  drop() { this.remake(); this.figure.remove(); }

  show(xs, ys, x, empty) {
    this.value.textContent = ys.length ? number(ys.at(-1), 3) : empty;
    this.canvas.setAttribute("aria-label", ys.length ? `${this.title}, from ${number(ys[0], 3)} to ${number(ys.at(-1), 3)} in ${ys.length} points over ${OVER[x]}` : `${this.title}: ${empty}`);
    if (this.x !== x) this.remake();
    this.x = x;
    if (this.plot) this.plot.setData([xs, ys]);
    else if (ys.length) this.plot = new uPlot(this.options(x), [xs, ys], this.canvas);
  }

  options(x) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const label = tick(x);
    return {
      ...this.size(),
      scales: { x: { time: false }, y: { range: (_, low, high) => (low === high ? [low - 0.1, high + 0.1] : uPlot.rangeNum(low, high, 0.1, false)) } },
      cursor: { y: false, points: { size: 6 } },
      legend: { show: false },
      axes: [
        { ...axis, size: this.small ? 26 : 44, space: this.small ? 60 : 80, values: (_, splits) => splits.map(label), label: this.small ? undefined : OVER[x], labelSize: 18, labelFont: "12px system-ui, sans-serif" },
        { ...axis, size: 52, space: this.small ? 30 : 40 },
      ],
      series: [{}, { stroke: colour("--blue"), width: 2, points: { show: (_, __, from, to) => to - from < 30, size: 5 } }],
    };
  }
}
