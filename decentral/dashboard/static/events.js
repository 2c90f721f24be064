// What is worth a sentence, the newest first.

import { byId, el, fill } from "./dom.js";
import { clock } from "./format.js";

export function showEvents(part) {
  const lines = part.events.map((event) => el("li", {}, el("time", {}, clock(event.t)), el("span", {}, event.text)));
  fill(byId("events"), lines.length ? el("ul", { class: "events", tabindex: 0, "aria-label": "Events, newest first" }, lines) : el("p", { class: "quiet" }, "nothing yet"));
}
