// KV transfer: bytes of a prompt, seconds over each link as bars, and as curves beside prefill. The
// figures are those of `jdisagg kv_calculator`.

import { figures, logChart, powers } from "./charts.js";
import { bytes, count, el, seconds } from "./dom.js";

const SHORT = {
  nvlink4: "NVLink",
  pcie5: "PCIe 5",
  "infiniband-ndr": "InfiniBand",
  "ethernet-100g": "100 GbE",
  "ethernet-25g": "25 GbE",
  "ethernet-10g": "10 GbE",
};
const LOW_SECONDS = 1e-4;

const size = (tokens) => (tokens >= 1024 ? `${tokens / 1024}k` : String(tokens));

// `facts` from api/guide/facts; `asked`: the guide's question; `names`: text of each link.
export function drawKv(place, facts, asked, names) {
  const row = facts.lengths.find((length) => length.prompt_tokens === asked.prompt_tokens);
  const used = row.links.find((link) => link.link === asked.link);
  const chart = el("div", { class: "chart-place" });
  place.replaceChildren(
    el("p", { class: "formula" }, "KV of a token = ", facts.formula, " = ",
      el("b", {}, `${count(facts.kv_bytes_per_token)} bytes`)),
    el("p", { class: "hint" }, formulaText(facts)),
    el("p", { class: "verdict" }, sentence(facts, row, used, names[asked.link])),
    bars(row, asked.link, names, facts),
    el("p", { class: "hint" }, "The lengths of the bars are logarithmic."),
    el("h3", {}, "Seconds against prompt length"),
    chart,
    figures(
      ["Prompt tokens", "KV", "Prefill", ...facts.lengths[0].links.map((link) => SHORT[link.link])],
      facts.lengths.map((length) => [
        count(length.prompt_tokens),
        bytes(length.sent_bytes),
        seconds(length.prefill_seconds),
        ...length.links.map((link) => seconds(link.seconds)),
      ]),
    ),
  );
  curves(chart, facts, asked);
}

function formulaText(facts) {
  const parts = facts.latent
    ? ["With MLA all heads share one latent and one rotary part, so the factor 2 x heads is missing."]
    : ["That is keys and values (2) x layers x KV heads x head size x bytes of a value."];
  if (facts.window) {
    parts.push(
      `Layers with a window send its ${count(facts.window)} positions only, so longer prompts send less.`,
    );
  }
  return parts.join(" ");
}

function sentence(facts, row, used, name) {
  const share = (100 * used.seconds) / row.prefill_seconds;
  const links =
    facts.parallel_links === 1 ? "" : ` on each of ${facts.parallel_links} devices in parallel`;
  const sent =
    row.sent_bytes < row.kv_bytes ? `, of which ${bytes(row.sent_bytes)} are sent` : "";
  return (
    `A prompt of ${count(row.prompt_tokens)} tokens has ${bytes(row.kv_bytes)} of KV${sent}. ` +
    `Over ${name}${links}, it takes ${seconds(used.seconds)}, ` +
    `${Number(share.toPrecision(2))} % of the ${seconds(row.prefill_seconds)} of its prefill. ` +
    (used.exposed_seconds < used.seconds * 0.99
      ? `Most of it is sent while later chunks compute: ${seconds(used.exposed_seconds)} remain ` +
        "and delay the second token."
      : share < 100
        ? "The first token does not wait for it, the second does."
        : "The link is slower than the prefill: it limits the rate of prompts.")
  );
}

function bars(row, chosen, names, facts) {
  const all = facts.lengths.flatMap((length) => length.links.map((link) => link.seconds));
  const high = Math.max(...all, facts.lengths.at(-1).prefill_seconds);
  const part = (value) =>
    Math.max(0.01, Math.log(value / LOW_SECONDS) / Math.log(high / LOW_SECONDS));
  const line = (label, value, kind, mark) =>
    el(
      "li",
      { class: mark ? "chosen" : "" },
      el("span", { class: "name" }, label),
      el("span", { class: "bar" }, el("i", { class: kind, style: { width: `${100 * part(value)}%` } })),
      el("b", {}, seconds(value)),
    );
  return el(
    "ul",
    { class: "kv-bars", "aria-label": "Seconds of one prompt, on a logarithmic scale" },
    line("Prefill", row.prefill_seconds, "prefill", false),
    ...row.links.map((link) => line(names[link.link], link.seconds, "transfer", link.link === chosen)),
  );
}

function curves(place, facts, asked) {
  const lengths = facts.lengths.map((length) => length.prompt_tokens);
  const of = (pick) => facts.lengths.map((length) => [length.prompt_tokens, pick(length)]);
  const links = facts.lengths[0].links.map(({ link }, index) => ({
    points: of((length) => Math.max(LOW_SECONDS, length.links[index].seconds)),
    kind: "transfer",
    label: SHORT[link],
    faint: link !== asked.link,
  }));
  const prefill = { points: of((length) => length.prefill_seconds), kind: "prefill", label: "Prefill" };
  const high = Math.max(...[...links, prefill].flatMap(({ points }) => points.map(([, y]) => y)));
  logChart(place, {
    title: "Seconds of prefill and of the KV transfer over each link against prompt length",
    x: {
      low: lengths[0],
      high: lengths.at(-1),
      ticks: lengths.filter((_, index) => index % 2 === 0),
      text: size,
      title: "prompt tokens",
    },
    y: {
      low: LOW_SECONDS,
      high: high * 1.2,
      ticks: powers(10, LOW_SECONDS, high * 1.2),
      text: (value) => (value < 1 ? `${Number((value * 1000).toPrecision(1))} ms` : `${value} s`),
      title: "",
    },
    lines: [...links, prefill],
    marks: [{ x: asked.prompt_tokens }],
  });
}
