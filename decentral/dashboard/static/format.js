// Numbers for people: decimal units, as links are sold; spans as the command line says them.

export const NOT_KNOWN = "not known";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function bytes(value) {
  if (!known(value)) return NOT_KNOWN;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]]) if (value >= 0.1 * size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${(value / 1e3).toFixed(1)} kB`;
}

export function bits(perSecond) {
  if (!known(perSecond)) return NOT_KNOWN;
  return perSecond >= 1e5 ? `${(perSecond / 1e6).toFixed(perSecond < 1e7 ? 1 : 0)} Mbit/s` : `${(perSecond / 1e3).toFixed(1)} kbit/s`;
}

export const rate = (bytesPerSecond) => (known(bytesPerSecond) ? bits(8 * bytesPerSecond) : NOT_KNOWN);

export function span(seconds) {
  if (!known(seconds)) return NOT_KNOWN;
  for (const [unit, size, digits] of [["days", 86400, 1], ["h", 3600, 1], ["min", 60, 0]]) if (seconds >= 2 * size) return `${(seconds / size).toFixed(digits)} ${unit}`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

// The built-in model's losses come in nats per token, which is a byte; those of a loop of one's own are shown as they are.
export const perNat = (me) => (me.own_loop ? 1 : Math.LOG2E);

export const number = (value, digits = 4) => (known(value) ? value.toFixed(digits) : NOT_KNOWN);
export const count = (value) => (known(value) ? value.toLocaleString("en") : NOT_KNOWN);
export const moment = (seconds) => {
  const day = (at) => at.toLocaleDateString("en-CA");
  const then = new Date(1000 * seconds);
  return known(seconds) ? (day(then) === day(new Date()) ? "" : `${day(then)} `) + clock(seconds) : "";
};
export const clock = (seconds) => (known(seconds) ? new Date(1000 * seconds).toLocaleTimeString("en-GB") : "");
export const plural = (shown, one, many = shown) => `${shown} ${one}${many === 1 ? "" : "s"}`;

const UNITS = { count, bytes, "bytes/s": rate, "bit/s": bits, s: span, nats: number };
export const inUnit = (value, unit) => (unit ? UNITS[unit](value) : value || NOT_KNOWN);
