// The interactive guide: the server simulates the same arrivals in three serving modes on the same
// number of accelerators. Each request is a line: grey until its first token, blue while tokens
// arrive, and red while they stall, which shows the interference.

import { post } from "./api.js";
import { byId, count, el, seconds } from "./dom.js";

const WAYS = {
  unified: ["Unified", "Each mesh prefills a whole prompt while its running streams wait."],
  chunked: ["Chunked", "Each decode step includes a chunk of a prompt: none stalls, all are slower."],
  disaggregated: ["Disaggregated", "One mesh prefills, another decodes. KV is sent over the link."],
};
const RATES = [0.5, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16];
const PROMPTS = [256, 512, 1024, 2048, 4096, 8192, 16384];
// A gap longer than this multiple of the median is a stall.
const STALL = 4;
const LATER_MS = 250;

const state = { asked: "", timer: null, waiting: false };

const question = () => ({
  prompt_tokens: PROMPTS[Number(byId("guide-prompt").value)],
  rate: RATES[Number(byId("guide-rate").value)],
  link: byId("guide-link").value,
});

function label() {
  const { prompt_tokens: tokens, rate } = question();
  byId("guide-prompt-said").textContent = `${count(tokens)} tokens`;
  byId("guide-rate-said").textContent = `${rate} requests/s`;
}

export function startGuide() {
  byId("guide-prompt").max = PROMPTS.length - 1;
  byId("guide-rate").max = RATES.length - 1;
  for (const id of ["guide-prompt", "guide-rate", "guide-link"]) {
    byId(id).addEventListener("input", () => {
      label();
      clearTimeout(state.timer);
      state.timer = setTimeout(simulate, LATER_MS);
    });
  }
  label();
}

// Simulates the sliders' setting, unless it is already shown or a simulation runs.
export async function simulate() {
  const asked = JSON.stringify(question());
  if (asked === state.asked || state.waiting) return;
  state.waiting = true;
  byId("guide-said").textContent = "simulating";
  try {
    draw(await post("api/guide", question()));
    state.asked = asked;
    byId("guide-said").textContent = "";
  } catch (error) {
    byId("guide-said").textContent = error.message;
    state.timer = setTimeout(simulate, 8 * LATER_MS);
  } finally {
    state.waiting = false;
  }
  if (JSON.stringify(question()) !== asked) simulate(); // a slider was moved meanwhile
}

function draw(answer) {
  const shown = answer.ways.flatMap((way) => way.requests);
  const end = Math.max(...shown.map((request) => request.finish));
  const best = (of) => Math.min(...answer.ways.map(of).filter((value) => value !== null));
  const bests = {
    ttft: best((way) => way.ttft[1]),
    tbt: best((way) => way.tbt[1]),
    longest: best((way) => way.tbt[2]),
  };
  byId("ways").replaceChildren(...answer.ways.map((way) => drawWay(way, end, bests)));
  byId("guide-about").textContent =
    `${count(answer.requests)} requests of ${answer.model} on ${answer.accelerators} simulated ` +
    `${answer.hardware.toUpperCase()}: ${count(100 - 100 * answer.long_part)} % have ` +
    `${answer.short_tokens} tokens, the others are long. The simulation runs the real router, ` +
    `schedulers and workers with predicted step times. The first ${shown.length / 3} are drawn.`;
}

function figure(label, value, best) {
  const kind = value !== null && value <= best * 1.05 ? "best" : "";
  return el("div", { class: `measure ${kind}` }, el("b", {}, seconds(value)), label);
}

function drawWay(way, end, bests) {
  const [title, story] = WAYS[way.mode];
  const lanes = el("div", { class: "lanes" });
  lanes.append(...way.requests.map((request) => lane(request, end, way.tbt[0])));
  return el(
    "section",
    { class: "way", "data-mode": way.mode },
    el("h3", {}, title),
    el("p", { class: "hint" }, story),
    el(
      "div",
      { class: "measures" },
      figure("first token, p99", way.ttft[1], bests.ttft),
      figure("between tokens, p99", way.tbt[1], bests.tbt),
      figure("longest pause", way.tbt[2], bests.longest),
    ),
    lanes,
    el("p", { class: "axis" }, el("span", {}, "0"), el("span", {}, seconds(end))),
  );
}

function lane(request, end, usual) {
  const made = el("div", {
    class: "lane",
    title: `${count(request.prompt_tokens)} prompt tokens, first token after ${seconds(
      request.first_token === null ? null : request.first_token - request.arrival,
    )}`,
  });
  const part = (from, to, kind) => {
    const style = { left: `${(100 * from) / end}%`, width: `${(100 * (to - from)) / end}%` };
    made.append(el("i", { class: kind, style }));
  };
  const first = request.first_token ?? request.finish;
  part(request.arrival, first, "before");
  let at = first;
  for (const [gap, times] of request.gaps) {
    const until = at + gap * times;
    part(at, until, usual && gap > STALL * usual ? "stall" : "flow");
    at = until;
  }
  return made;
}
