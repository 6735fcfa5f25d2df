// A request's timeline from its arrival to its last token. Spans are those of the server
// (observe/ports.py, mesh.py, path.py), grouped into a few rows.

import { el, seconds } from "./dom.js";

const ROWS = [
  ["Request", "whole", ["request", "first token"]],
  ["Queue", "wait", ["queue", "prefill wait"]],
  ["Reserve", "wait", ["reserve"]],
  ["Prefill", "prefill", ["prefill compute", "prefill chunk"]],
  ["Transfer", "transfer", ["pull", "exposed transfer", "offer", "all offered", "extract"]],
  ["Insert", "transfer", ["insert", "verified"]],
  ["Admit", "decode", ["hand-off to first span", "first span", "admit", "moved"]],
  ["Decode", "decode", ["decode", "preempted", "migration"]],
  ["Failures", "bad", ["retry", "failed", "source lost", "hand-off aborted"]],
];

// Spans that other rows show in more detail.
const DETAILED = ["prefill"];

function withQueue(spans) {
  const root = spans.find((span) => span.name === "request");
  const reserve = spans.find((span) => span.name === "reserve");
  if (!root || !reserve || reserve.started - root.started < 1e-5) return spans;
  return [
    { name: "queue", started: root.started, ended: reserve.started, args: {} },
    ...spans,
  ];
}

function titleOf(span, origin) {
  const parts = [span.name, `at ${seconds(span.started - origin)}`];
  if (span.ended !== null) parts.push(`took ${seconds(span.ended - span.started)}`);
  for (const [name, value] of Object.entries(span.args)) {
    if (!["request", "tenant"].includes(name)) parts.push(`${name} ${value}`);
  }
  return parts.join(" · ");
}

function mark(span, kind, origin, whole) {
  const left = `${(100 * (span.started - origin)) / whole}%`;
  const title = titleOf(span, origin);
  if (span.ended === null) return el("i", { class: `tick ${kind}`, style: { left }, title });
  const width = `${(100 * (span.ended - span.started)) / whole}%`;
  return el("i", { class: `span ${kind}`, style: { left, width }, title });
}

function axis(whole) {
  const made = el("div", { class: "axis" });
  for (let part = 0; part <= 4; part += 1) {
    made.append(el("span", {}, part ? seconds((whole * part) / 4) : "0"));
  }
  return el("div", { class: "row" }, el("b"), made);
}

// `spans` as returned by /api/timelines/TRACE.
export function drawTimeline(spans) {
  if (!spans.length) return el("p", { class: "hint" }, "No spans yet.");
  const all = withQueue(spans);
  const origin = Math.min(...all.map((span) => span.started));
  const end = Math.max(...all.map((span) => span.ended ?? span.started));
  const whole = Math.max(end - origin, 1e-6);
  const made = el("div", { class: "timeline" });
  for (const [label, kind, names] of ROWS) {
    const mine = all.filter((span) => names.includes(span.name));
    if (!mine.length) continue;
    const workers = [...new Set(mine.map((span) => span.args.worker).filter(Boolean))];
    const title = workers.length ? `${label}: ${workers.join(", ")}` : label;
    const track = el("div", { class: "track" });
    track.append(...mine.map((span) => mark(span, kind, origin, whole)));
    made.append(el("div", { class: "row" }, el("b", { title }, label), track));
  }
  const others = all.filter(
    (span) => !DETAILED.includes(span.name) && !ROWS.some((row) => row[2].includes(span.name)),
  );
  if (others.length) {
    const track = el("div", { class: "track" });
    track.append(...others.map((span) => mark(span, "wait", origin, whole)));
    made.append(el("div", { class: "row" }, el("b", {}, "Other"), track));
  }
  made.append(axis(whole), el("p", { class: "hint" }, workersOf(all)));
  return made;
}

function workersOf(spans) {
  const by = (names) =>
    [...new Set(spans.filter((span) => names.includes(span.name)).map((span) => span.args.worker))]
      .filter(Boolean)
      .join(", ");
  const prefill = by(["prefill", "prefill chunk"]);
  const decode = by(["decode", "hand-off to first span", "first span", "admit"]);
  if (!decode) return "";
  return prefill && prefill !== decode
    ? `Prefilled by ${prefill}, decoded by ${decode}.`
    : `Prefilled and decoded by ${decode}.`;
}
