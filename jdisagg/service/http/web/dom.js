// Creates elements. Text is inserted as text. No code of this page parses HTML, so a model's output
// can never become markup.

export const byId = (id) => document.getElementById(id);

// el("p", {class: "hint", title: "x"}, "text", otherElement): an element with attributes.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// The same for an element of a drawing, in the namespace of the page's empty drawing.
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(byId("drawing").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  return `${(value / 60).toFixed(0)} min`;
}

export function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 999.5 && at < units.length - 1; at += 1) value /= 1000;
  return `${Number(value.toPrecision(3))} ${units[at]}`;
}

export const count = (value) => Math.round(value).toLocaleString("en");

export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

// A bar of parts: [[share of 1, class, title], ...].
export function bar(parts, title) {
  const made = el("span", { class: "bar", title });
  for (const [share, kind] of parts) {
    if (share > 0) made.append(el("i", { class: kind, style: { width: `${100 * share}%` } }));
  }
  return made;
}
