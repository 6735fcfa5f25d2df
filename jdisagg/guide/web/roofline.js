// The roofline: arithmetic intensity and predicted speed of both phases on one device, over the
// number of sequences of a decode step and of tokens of a prefill.

import { figures, logChart, powers } from "./charts.js";
import { count, el, seconds } from "./dom.js";

const NAMED = { decode: [1, 16, 128, 512], prefill: [16, 128, 1024] };

const three = (value) => Number(value.toPrecision(3));
const tera = (value) => `${three(value / 1e12)} TFLOP/s`;

export function drawRoofline(place, facts) {
  const { roofline } = facts;
  const ridge = roofline.peak_flops / roofline.bytes_per_second;
  const chart = el("div", { class: "chart-place" });
  const rows = [
    ...roofline.decode.map((point) => ["decode", `${count(point.size)} sequences`, point]),
    ...roofline.prefill.map((point) => ["prefill", `${count(point.size)} tokens`, point]),
  ];
  place.replaceChildren(
    el("p", { class: "verdict" }, sentence(facts, ridge)),
    el(
      "p",
      { class: "hint keys" },
      el("span", {}, el("i", { class: "decode" }), "decode, by sequences"),
      el("span", {}, el("i", { class: "prefill" }), "prefill, by tokens"),
      el("span", {}, el("i", { class: "hollow" }), "KV does not fit"),
    ),
    chart,
    figures(
      ["Phase", "Size", "FLOP per byte", "Speed", "Step", "Bound by", "KV fits"],
      rows.map(([phase, size, point]) => [
        phase,
        size,
        String(three(point.intensity)),
        tera(point.flops_per_second),
        seconds(point.seconds),
        point.bound,
        point.fits ? "yes" : "no",
      ]),
    ),
  );
  draw(chart, roofline, ridge);
}

function sentence({ roofline, hardware, devices }, ridge) {
  const at = (points, size) => points.find((point) => point.size === size);
  const [one, many] = [at(roofline.decode, 1), at(roofline.decode, 64)];
  const prompt = at(roofline.prefill, 8192);
  const each = devices === 1 ? "" : ` Figures are those of one of the ${devices} devices of an instance.`;
  return (
    `One ${hardware.toUpperCase()} needs ${count(ridge)} FLOP per byte read to be busy. Decode of one ` +
    `sequence of ${count(roofline.context_tokens)} tokens does ${three(one.intensity)}, of 64 sequences ${three(many.intensity)}: it waits for ` +
    `memory. Prefill of 8,192 tokens does ${count(prompt.intensity)} and is bound by ` +
    `${prompt.bound === "compute" ? "arithmetic" : "memory"}. Larger batches help decode; a prompt ` +
    `needs none.${each}`
  );
}

function draw(place, roofline, ridge) {
  const points = [...roofline.prefill, ...roofline.decode];
  const low = Math.min(...points.map((point) => point.intensity), 1) * 0.7;
  const high = Math.max(...points.map((point) => point.intensity), ridge) * 2;
  const floor = Math.min(...points.map((point) => point.flops_per_second)) * 0.5;
  const roof = [
    [Math.max(low, floor / roofline.bytes_per_second), 0],
    [ridge, roofline.peak_flops],
    [high, roofline.peak_flops],
  ];
  roof[0][1] = roof[0][0] * roofline.bytes_per_second;
  const line = (phase) => ({
    points: roofline[phase].map((point) => [
      point.intensity,
      point.flops_per_second,
      point.fits,
      NAMED[phase].includes(point.size) ? count(point.size) : "",
    ]),
    kind: phase,
    dots: true,
    above: phase === "decode",
  });
  logChart(place, {
    title: "Roofline: predicted FLOP per second against FLOP per byte, for prefill and decode",
    x: {
      low,
      high,
      ticks: powers(10, low, high),
      text: (value) => count(value),
      title: "FLOP per byte",
    },
    y: {
      low: floor,
      high: roofline.peak_flops * 1.6,
      ticks: powers(10, floor, roofline.peak_flops * 1.6),
      text: (value) => count(value / 1e12),
      title: "TFLOP/s",
    },
    lines: [{ points: roof, kind: "roof" }, line("decode"), line("prefill")],
  });
}
