// Line charts with logarithmic axes. A chart is as wide as its place, so that its text keeps its size.

import { el, svg } from "./dom.js";

const MARGIN = { left: 58, right: 14, top: 20, bottom: 40 };
const NEAR = 13; // pixels between the labels of two lines

// Powers of `base` between two values, both included.
export function powers(base, low, high) {
  const found = [];
  for (let at = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); ; at += 1) {
    const value = base ** at;
    if (value > high * 1.0001) return found;
    found.push(value);
  }
}

// Draws `lines` ({points: [[x, y, full, name]], kind, label, dots,
// faint, above}) and `marks` ({x, label}).
// x and y: {low, high, ticks, text, title}.
export function logChart(place, { title, x, y, lines, marks = [] }) {
  const width = Math.max(280, Math.min(760, place.clientWidth || 600));
  const height = Math.round(Math.max(230, width * 0.5));
  const labels = lines.some((line) => line.label) ? Math.min(150, width * 0.28) : 0;
  const right = width - MARGIN.right - labels;
  const bottom = height - MARGIN.bottom;
  const scale = (axis, from, to) => (value) =>
    from +
    ((to - from) * (Math.log(value) - Math.log(axis.low))) / (Math.log(axis.high) - Math.log(axis.low));
  const [at, up] = [scale(x, MARGIN.left, right), scale(y, bottom, MARGIN.top)];
  const made = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    class: "chart",
    role: "img",
    "aria-label": title,
  });
  for (const tick of x.ticks) {
    made.append(
      svg("line", { x1: at(tick), x2: at(tick), y1: MARGIN.top, y2: bottom, class: "grid" }),
      svg("text", { x: at(tick), y: bottom + 15, "text-anchor": "middle" }, x.text(tick)),
    );
  }
  for (const tick of y.ticks) {
    made.append(
      svg("line", { x1: MARGIN.left, x2: right, y1: up(tick), y2: up(tick), class: "grid" }),
      svg("text", { x: MARGIN.left - 6, y: up(tick) + 4, "text-anchor": "end" }, y.text(tick)),
    );
  }
  for (const mark of marks) {
    made.append(
      svg("line", { x1: at(mark.x), x2: at(mark.x), y1: MARGIN.top, y2: bottom, class: "mark" }),
    );
  }
  made.append(
    svg("text", { x: (MARGIN.left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title),
    svg("text", { x: 4, y: 11 }, y.title),
    ...lines.flatMap((line) => drawLine(line, at, up)),
    ...ends(lines, up, right),
  );
  place.replaceChildren(made);
}

function drawLine({ points, kind, dots, faint, above }, at, up) {
  const path = points.map(([x, y]) => `${at(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
  const drawn = [svg("polyline", { points: path, class: `line ${kind} ${faint ? "faint" : ""}` })];
  for (const [x, y, full = true, name = ""] of dots ? points : []) {
    drawn.push(
      svg("circle", { cx: at(x), cy: up(y), r: 4, class: `dot ${kind} ${full ? "" : "open"}` }),
    );
    if (name) {
      const place = above
        ? { x: at(x) - 5, y: up(y) - 6, "text-anchor": "end" }
        : { x: at(x) + 6, y: up(y) + 14 };
      drawn.push(svg("text", { ...place, class: "name" }, name));
    }
  }
  return drawn;
}

// Labels at the lines' ends, moved apart where they would overlap.
function ends(lines, up, right) {
  const labelled = lines
    .filter((line) => line.label)
    .map((line) => ({ line, y: up(line.points.at(-1)[1]) }))
    .sort((one, other) => one.y - other.y);
  let last = -Infinity;
  return labelled.map(({ line, y }) => {
    last = Math.max(y, last + NEAR);
    return svg("text", { x: right + 5, y: last + 4, class: `label ${line.kind}` }, line.label);
  });
}

// The figures of a chart as a table, for readers of text.
export function figures(heads, rows) {
  const cells = (row) => row.map((value, index) => el("td", { "data-label": heads[index] }, value));
  return el(
    "details",
    {},
    el("summary", {}, "The figures as a table"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
      ),
    ),
  );
}
