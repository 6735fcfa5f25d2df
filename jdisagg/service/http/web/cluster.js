// The live cluster: pools and workers as reported by GetStatus.

import { bar, byId, bytes, count, el, plural, seconds, svg } from "./dom.js";

// Totals of the server, once a second for the last minute: {at, prompt_tokens, ...}.
const MINUTE = 60;
const NOW_SECONDS = 5; // over which the present rate is taken
const samples = [];

const POOLS = [
  ["prefill", "Prefill"],
  ["decode", "Decode"],
  ["mixed", "Prefill and decode"],
];

// Where predicted times of a worker come from.
const PRICES = {
  given: "Times are predicted from the hardware given with --hardware.",
  measured: "Times are predicted from programs that the worker timed at its start.",
  assumed: "The worker has not measured its programs: an H100's times are assumed.",
  learned: "Predicted times are corrected by finished requests.",
};

const sum = (values) => values.reduce((total, value) => total + value, 0);

function pagesOf(workers) {
  const all = workers.flatMap((worker) => worker.pages);
  const of = (kind) => sum(all.map((pages) => pages[kind] || 0));
  const [used, reserved, free] = [of("used"), of("reserved"), of("free")];
  return { used, reserved, free, total: used + reserved + free };
}

function pagesBar({ used, reserved, free, total }) {
  const title = `${count(used)} pages used, ${count(reserved)} reserved, ${count(free)} free`;
  return bar([[used / (total || 1), "used"], [reserved / (total || 1), "reserved"]], title);
}

function stateOf(worker) {
  if (worker.draining) return ["draining", "warn"];
  if (worker.barred_seconds > 0) return [`excluded for ${seconds(worker.barred_seconds)}`, "bad"];
  return ["serving", "good"];
}

const cell = (label, ...children) => el("td", { "data-label": label }, ...children);

function row(worker) {
  const [state, kind] = stateOf(worker);
  const pages = pagesOf([worker]);
  const busy = bar(
    [[worker.running / (worker.slots || 1), "used"]],
    `${worker.running} of ${worker.slots} slots`,
  );
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, worker.name, el("small", {}, worker.layout)),
    cell(
      "State",
      el("span", { class: `state ${kind}` }, state),
      el("small", { title: PRICES[worker.prices] }, `prices ${worker.prices}`),
    ),
    cell("Running", busy, el("small", {}, `${worker.running} / ${worker.slots}`)),
    cell("Waiting", count(worker.waiting)),
    cell("Hand-offs", count(worker.handoffs)),
    cell("Pages", pagesBar(pages), el("small", {}, `${count(pages.free)} free`)),
    cell("Preempted", count(worker.preemptions)),
  );
}

function pool(title, workers) {
  const pages = pagesOf(workers);
  const running = sum(workers.map((worker) => worker.running));
  const slots = sum(workers.map((worker) => worker.slots));
  const tokens = sum(workers.map((worker) => worker.queued_tokens));
  const heads = ["Worker", "State", "Running", "Waiting", "Hand-offs", "Pages", "Preempted"];
  const summary = [
    plural(workers.length, "worker"),
    `${count(running)} of ${count(slots)} slots`,
    `${count(tokens)} tokens to prefill`,
    `${count(pages.free)} of ${count(pages.total)} pages free`,
  ];
  return el(
    "section",
    { class: "pool" },
    el("h2", {}, title, el("small", {}, summary.join(" · "))),
    pagesBar(pages),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...workers.map(row)),
      ),
    ),
  );
}

const legend = () =>
  el(
    "p",
    { class: "hint legend" },
    el("i", { class: "used" }),
    "in use ",
    el("i", { class: "reserved" }),
    "reserved for incoming KV",
  );

const figure = (value, label) => el("div", { class: "figure" }, el("b", {}, value), label);

export function measure(traffic) {
  if (!traffic) return;
  samples.push({ at: performance.now() / 1000, ...traffic });
  while (samples.length > 1 && samples.at(-1).at - samples[0].at > MINUTE) samples.shift();
}

function rateBetween(one, other, name) {
  const [from, to] = [one[name] || 0, other[name] || 0];
  return other.at > one.at ? Math.max(0, to - from) / (other.at - one.at) : 0;
}

// The present rate of a total, and its course over the last minute.
function rate(name, text, label) {
  const last = samples.at(-1);
  if (!last || last[name] === null) {
    return figure("–", `${label}: counted in the workers' processes`);
  }
  const since = samples.find((sample) => last.at - sample.at <= NOW_SECONDS) || last;
  const rates = samples.slice(1).map((sample, index) => ({
    at: sample.at,
    value: rateBetween(samples[index], sample, name),
  }));
  const most = Math.max(0, ...rates.map(({ value }) => value));
  const made = figure(text(rateBetween(since, last, name)), label);
  const points = rates.map(
    ({ at, value }) =>
      `${(120 * (1 - (last.at - at) / MINUTE)).toFixed(1)},${(27 - (25 * value) / (most || 1)).toFixed(1)}`,
  );
  const said = `${label} over the last minute, ${text(most)} at most`;
  made.append(
    svg(
      "svg",
      { viewBox: "0 0 120 28", class: "spark", role: "img", "aria-label": said },
      svg("polyline", { points: points.join(" ") }),
    ),
    el("small", {}, `at most ${text(most)} in the last minute`),
  );
  return made;
}

export function drawCluster(status) {
  const { workers, waiting, model } = status;
  const running = sum(
    workers.filter((worker) => worker.role !== "prefill").map((worker) => worker.running),
  );
  byId("figures").replaceChildren(
    rate("generated_tokens", (value) => `${count(value)}/s`, "generated tokens"),
    rate("prompt_tokens", (value) => `${count(value)}/s`, "prompt tokens of finished requests"),
    rate("kv_bytes", (value) => `${bytes(value)}/s`, "KV from prefill to decode"),
    figure(count(workers.length), workers.length === 1 ? "worker" : "workers"),
    figure(count(running), "running sequences"),
    figure(count(waiting), "waiting at the router"),
    figure(count(sum(workers.map((worker) => worker.handoffs))), "hand-offs in progress"),
    figure(count(model.kv_bytes_per_token), "KV bytes per token"),
  );
  const place = byId("pools");
  const scrolled = [...place.querySelectorAll(".scroll")].map((part) => part.scrollTop);
  const drawn = POOLS.map(([role, title]) => [
    title,
    workers.filter((worker) => worker.role === role),
  ]).filter(([, members]) => members.length);
  place.replaceChildren(
    ...(drawn.length
      ? [...drawn.map(([title, members]) => pool(title, members)), legend()]
      : [el("p", { class: "hint" }, "No workers are registered.")]),
  );
  place.querySelectorAll(".scroll").forEach((part, index) => {
    part.scrollTop = scrolled[index] || 0;
  });
}
