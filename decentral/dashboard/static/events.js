// What is worth a sentence, the newest first.

import { byId, el, fill, withCommands } from "./dom.js";
import { clock } from "./format.js";

const SHOWN = 16; // lines; who wants the rest opens it

const list = (events, label) => el("ul", { class: "events", "aria-label": label }, events.map((event) => el("li", {}, el("time", {}, clock(event.t)), el("span", {}, withCommands(event.text)))));

export function showEvents(part) {
  const older = part.events.slice(SHOWN);
  const wasOpen = byId("events").querySelector("details")?.open ?? false;
  if (!part.events.length) return fill(byId("events"), el("p", { class: "quiet" }, "nothing yet"));
  return fill(byId("events"), list(part.events.slice(0, SHOWN), "Events, newest first"),
    older.length ? el("details", { open: wasOpen }, el("summary", {}, `${older.length} older`), list(older, "Older events")) : null);
}
