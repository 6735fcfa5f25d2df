// The interactive guide: controls, the advice, and the parts that draw the server's answers. All
// figures come from the server: simulations from api/guide, facts of a model from api/guide/facts.
// This is the only code of the page that uses the network.

import { byId, count, el, seconds } from "./dom.js";
import { drawKv } from "./kv.js";
import { drawRoofline } from "./roofline.js";
import { drawWays, NAMES } from "./ways.js";

const LATER_MS = 250;
const short = (value) => String(value).replace(/\.0$/, "");

// Sliders: the field of the question, its values, and their text.
const SLIDERS = {
  prompt: ["prompt_tokens", [256, 512, 1024, 2048, 4096, 8192, 16384, 32768], tokens],
  answer: ["output_tokens", [16, 32, 64, 128, 256, 512, 1024], tokens],
  rate: ["rate", [0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], (value) => `${value} requests/s`],
  chunk: ["chunk_tokens", [256, 512, 1024, 2048, 4096, 8192], tokens],
  ttft: ["ttft_seconds", [0.1, 0.2, 0.5, 1, 2, 5, 10], (value) => `${short(value)} s`],
  tpot: [
    "tpot_seconds",
    [0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2],
    (value) => `${short(value * 1000)} ms`,
  ],
};
const SELECTS = { model: String, hardware: String, instances: Number, link: String };

const COMMON = { hardware: "h100", link: "infiniband-ndr", chunk: 512, ttft: 1, tpot: 0.02 };
const PRESETS = {
  documents: {
    ...COMMON,
    ...{ model: "deepseek-v3", hardware: "h200", instances: 2, prompt: 8192, answer: 128 },
    ...{ rate: 4, ttft: 2 },
  },
  chat: {
    ...COMMON,
    ...{ model: "llama-3.1-8b", instances: 2, prompt: 1024, answer: 256, rate: 48, ttft: 0.5 },
  },
  slow: {
    ...COMMON,
    ...{ model: "llama-3.1-8b", instances: 4, prompt: 16384, answer: 128, rate: 8, ttft: 2 },
    ...{ link: "ethernet-10g" },
  },
  low: {
    ...COMMON,
    ...{ model: "llama-3.1-8b", instances: 2, prompt: 4096, answer: 128, rate: 0.5 },
  },
};

const state = { asked: "", timer: null, waiting: false, facts: null };

async function post(path, body) {
  const headers = { "content-type": "application/json" };
  const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error.message);
  return answer;
}

function tokens(value) {
  return `${count(value)} tokens`;
}

function question() {
  const asked = {};
  for (const [name, kind] of Object.entries(SELECTS)) asked[name] = kind(byId(`guide-${name}`).value);
  for (const [name, [field, values]] of Object.entries(SLIDERS)) {
    asked[field] = values[Number(byId(`guide-${name}`).value)];
  }
  return asked;
}

function label() {
  for (const [name, [field, , text]] of Object.entries(SLIDERS)) {
    const said = text(question()[field]);
    byId(`guide-${name}-said`).textContent = said;
    byId(`guide-${name}`).setAttribute("aria-valuetext", said);
  }
}

function choose(preset) {
  for (const [name, value] of Object.entries(PRESETS[preset])) {
    const values = SLIDERS[name]?.[1];
    byId(`guide-${name}`).value = values ? values.indexOf(value) : value;
  }
  press(preset);
  label();
}

function press(preset) {
  for (const button of document.querySelectorAll("[data-preset]")) {
    button.setAttribute("aria-pressed", String(button.dataset.preset === preset));
  }
}

function start() {
  for (const [name, [, values]] of Object.entries(SLIDERS)) {
    byId(`guide-${name}`).max = values.length - 1;
  }
  choose("documents");
  byId("guide-form").addEventListener("submit", (event) => event.preventDefault());
  byId("guide-form").addEventListener("input", () => {
    press("");
    later();
  });
  for (const button of document.querySelectorAll("[data-preset]")) {
    button.addEventListener("click", () => {
      choose(button.dataset.preset);
      later();
    });
  }
  addEventListener("resize", drawFacts);
  simulate();
}

function later() {
  label();
  drawFacts();
  clearTimeout(state.timer);
  state.timer = setTimeout(simulate, LATER_MS);
}

// Asks for the controls' setting, unless it is already shown or a question is being answered.
async function simulate() {
  const asked = question();
  const text = JSON.stringify(asked);
  if (text === state.asked || state.waiting) return;
  state.waiting = true;
  byId("guide-said").textContent = "Simulating.";
  try {
    const { model, hardware } = asked;
    if (state.facts?.model !== model || state.facts?.hardware !== hardware) {
      state.facts = await post("api/guide/facts", { model, hardware });
      drawFacts();
    }
    const answer = await post("api/guide", asked);
    state.asked = text;
    byId("guide-said").textContent = "";
    drawAnswer(asked, answer);
  } catch (error) {
    byId("guide-said").textContent = error.message;
    state.timer = setTimeout(simulate, 8 * LATER_MS);
  } finally {
    state.waiting = false;
  }
  if (JSON.stringify(question()) !== text) simulate(); // a control was moved meanwhile
}

function drawFacts() {
  if (!state.facts) return;
  const names = Object.fromEntries(
    [...byId("guide-link").options].map((option) => [option.value, option.textContent]),
  );
  drawKv(byId("guide-kv"), state.facts, question(), names);
  drawRoofline(byId("guide-roofline"), state.facts);
}

function drawAnswer(asked, answer) {
  drawAdvice(answer.advice, asked);
  drawWays(byId("ways"), asked, answer);
  const each = answer.devices === 1 ? "accelerator" : `accelerators (${answer.layout})`;
  byId("guide-about").textContent =
    `${count(answer.requests)} requests on ${asked.instances} instances of ${answer.devices} ` +
    `${each}: ${count(100 - 100 * answer.long_part)} % of the prompts have ` +
    `${answer.short_tokens} tokens, the others are long. The simulation runs the real router, ` +
    `schedulers and workers with predicted step times. Each line is a request; ` +
    `the first ${answer.ways[0].requests.length} are drawn. ${answer.note}`;
}

function drawAdvice(advice, asked) {
  const heads = ["Mode", "Instances", "Highest rate within the objectives", "First limit"];
  const cell = (label, ...children) => el("td", { "data-label": label }, ...children);
  const rows = advice.modes.map((mode) => {
    const enough = mode.rate >= asked.rate;
    return el(
      "tr",
      { class: mode.mode === advice.mode ? "chosen" : "" },
      el("th", { scope: "row" }, NAMES[mode.mode][0]),
      cell(
        heads[1],
        mode.prefill_instances
          ? `${mode.prefill_instances} prefill, ${mode.decode_instances} decode`
          : `${mode.decode_instances} for both phases`,
      ),
      cell(
        heads[2],
        el(
          "span",
          { class: enough ? "good" : "bad" },
          `${Number(mode.rate.toPrecision(3))} requests/s ${enough ? "✓" : "✕"}`,
        ),
      ),
      cell(heads[3], mode.limit),
    );
  });
  byId("guide-advice").replaceChildren(
    el("p", { class: "advice" }, advice.sentence),
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows),
    ),
    el(
      "p",
      { class: "hint" },
      "The rates are stepped as by the planner, with 90 % of the requests within the objectives " +
        `(first token ${seconds(asked.ttft_seconds)}, each token ${seconds(asked.tpot_seconds)}). ` +
        "A mode is advised if it carries the rate and its simulation below agrees. ",
      el("code", {}, "jdisagg plan"),
      " searches layouts and numbers of instances, too.",
    ),
  );
}

start();
