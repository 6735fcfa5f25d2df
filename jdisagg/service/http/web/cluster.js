// The live cluster: pools and workers as reported by GetStatus.

import { bar, byId, count, el, plural, seconds } from "./dom.js";

const POOLS = [
  ["prefill", "Prefill"],
  ["decode", "Decode"],
  ["mixed", "Prefill and decode"],
];

// Where predicted times of a worker come from.
const PRICES = {
  given: "Times are predicted from the hardware given with --hardware.",
  measured: "Times are predicted from programs that the worker timed at its start.",
  learned: "Times are predicted from measured programs and corrected by finished requests.",
  none: "No times are predicted: the worker has not measured its programs.",
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
  if (worker.loading_seconds > 0) return [`loading ${seconds(worker.loading_seconds)}`, "warn"];
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

export function drawCluster(status) {
  const { workers, waiting, model } = status;
  const running = sum(
    workers.filter((worker) => worker.role !== "prefill").map((worker) => worker.running),
  );
  byId("figures").replaceChildren(
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
