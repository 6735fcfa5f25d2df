// A request's timeline from its arrival to its last token. Spans are those of the server
// (observe/ports.py, mesh.py, path.py), grouped into a few rows.

import { bytes, count, el, plural, seconds } from "./dom.js";

const ROWS = [
  ["Request", "whole", ["request", "first token"]],
  ["Queue", "wait", ["queue", "prefill wait"]],
  ["Reserve", "wait", ["reserve"]],
  ["Prefill", "prefill", ["prefill compute", "prefill chunk"]],
  ["Transfer", "transfer", ["pull", "exposed transfer", "offer", "all offered", "extract"]],
  ["Insert", "transfer", ["insert", "verified"]],
  ["Hand-off", "wait", ["hand-off to first span", "first span", "admit", "moved"]],
  ["Decode", "decode", ["decode", "preempted", "migration"]],
  ["Swapped out", "wait", ["swapped out"]],
  ["Failures", "bad", ["retry", "failed", "source lost", "hand-off aborted"]],
];

// What happens in a row.
const MEANS = {
  Request: "from its arrival to its last token",
  Queue: "waits for workers and for its turn",
  Reserve: "the decode worker reserves pages",
  Prefill: "computes the prompt",
  Transfer: "sends KV from prefill to decode",
  Insert: "writes KV into pages and compares checksums",
  "Hand-off": "the decode worker waits for the KV, then computes its first tokens",
  Decode: "computes the other tokens",
  "Swapped out": "its KV is in host memory, because others need the pages or it is suspended",
};

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
  made.append(axis(whole), figuresOf(all), el("p", { class: "hint" }, workersOf(all)));
  return made;
}

// Seconds in which at least one of the spans runs.
function covered(spans) {
  let [total, until] = [0, -Infinity];
  for (const { started, ended } of spans) {
    if (ended === null || ended <= until) continue;
    total += ended - Math.max(started, until);
    until = ended;
  }
  return total;
}

const total = (spans, name) => spans.reduce((sum, span) => sum + (span.args[name] || 0), 0);

// Seconds, bytes and tokens of each row, as a list.
function figuresOf(all) {
  const items = [];
  for (const [label, , names] of ROWS) {
    const mine = all.filter((span) => names.includes(span.name));
    if (!mine.length) continue;
    const named = (name) => mine.filter((span) => span.name === name);
    const parts = [seconds(covered(mine))];
    if (label === "Request") {
      const [first, whole] = [named("first token")[0], named("request")[0]];
      if (whole?.args.prompt_tokens) parts.push(`${count(whole.args.prompt_tokens)} prompt tokens`);
      if (first && whole) parts.push(`first token after ${seconds(first.started - whole.started)}`);
    }
    if (label === "Transfer") {
      const pulls = named("pull");
      const codecs = [...new Set(pulls.map((span) => span.args.codec))].filter(Boolean).join(", ");
      parts.push(`${bytes(total(pulls, "bytes"))} in ${plural(pulls.length, "transfer")}`);
      if (codecs) parts.push(`codec ${codecs}`);
      const exposed = named("exposed transfer");
      if (exposed.length) parts.push(`${seconds(covered(exposed))} after the prefill`);
    }
    const tokens = total(named("decode"), "tokens");
    if (label === "Decode" && tokens) {
      parts.push(`${plural(tokens, "token")}, ${seconds(covered(mine) / tokens)} each`);
    }
    items.push(
      el("dt", {}, label),
      el("dd", {}, parts.join(", "), el("small", {}, MEANS[label] || "")),
    );
  }
  return el("dl", { class: "spans" }, ...items);
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
