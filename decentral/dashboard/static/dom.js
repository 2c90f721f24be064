// Elements from plain data. Text only ever goes in as text nodes: names and reasons come from other people's machines.

const SVG = "http://www.w3.org/2000/svg";

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => made(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

// A sentence with what it says to type as something to copy: "decentral status --out DIR".
// Only what is whole and harmless in a shell: a verb, options, plain values or a quoted one, and then the end of a clause.
const COMMAND = /(decentral [a-z]+(?: --?[a-z][\w-]*(?: (?:[\w/~-][\w./~-]*[\w/~-]|[\w~]|'[^']*'))?)*)(?=$|[;,:)]|\.$|\. )/;
export const withCommands = (text) => text.split(COMMAND).map((part, at) => (at % 2 ? command(part) : part));

function command(text) {
  const copy = async () => {
    await navigator.clipboard?.writeText(text);
    setText(button, "copied");
  };
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy: ${text}` }, "copy");
  button.addEventListener("click", copy);
  return [el("code", {}, text), navigator.clipboard ? [" ", button] : []];
}

// Only where it differs: a screen reader would say it again, and a selection would be lost.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A thin bar, share in [0, 1]. Drawn by attributes: the policy allows no styles in the markup.
export function meter(share, is, label) {
  const width = Math.max(0, Math.min(1, share)) * 100;
  return svg("svg", { class: "meter", "data-is": is, viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("rect", { x: 0, y: 0, width, height: 6 }));
}
