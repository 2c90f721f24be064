// A slider over the rounds of a run that is over.

import { byId } from "./dom.js";

const BEAT = 700; // ms a round is shown while it plays

export class Slider {
  constructor(ask) {
    this.ask = ask;
    this.timer = null;
    this.slider = byId("slider");
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    byId("before").addEventListener("click", () => this.go(this.at - 1));
    byId("after").addEventListener("click", () => this.go(this.at + 1));
    byId("play").addEventListener("click", () => this.play(this.timer === null));
  }

  get at() { return Number(this.slider.value); }

  show([first, last], at) {
    byId("replay").hidden = false;
    this.slider.min = first;
    this.slider.max = last;
    this.slider.value = at ?? last;
    this.tell();
  }

  tell() {
    byId("slider-at").textContent = `${this.slider.value} of ${this.slider.max}`;
    this.slider.setAttribute("aria-valuetext", `round ${this.slider.value} of ${this.slider.max}`);
  }

  go(round) {
    this.slider.value = round;
    this.tell();
    return this.ask(this.at);
  }

  play(on) {
    if (!on) clearInterval(this.timer);
    if (on && this.at >= Number(this.slider.max)) this.go(Number(this.slider.min));
    this.timer = on ? setInterval(() => (this.at >= Number(this.slider.max) ? this.play(false) : this.go(this.at + 1)), BEAT) : null;
    byId("play").setAttribute("aria-pressed", String(on));
    byId("play").textContent = on ? "Stop" : "Play";
  }
}
