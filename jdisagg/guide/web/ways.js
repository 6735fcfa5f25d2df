// The guide's simulation of three modes: figures against the objectives, and a line for each request.

import { count, el, seconds } from "./dom.js";

export const NAMES = {
  unified: ["Unified", "An instance prefills a whole prompt while its running streams wait."],
  chunked: ["Chunked", "Each decode step includes a chunk of a prompt: none stalls, all are slower."],
  disaggregated: ["Disaggregated", "Some instances prefill, others decode. KV is sent over the link."],
};
const MISSED = { ttft: "first token late", tpot: "tokens slow", pause: "paused" };

export function drawWays(place, asked, answer) {
  const shown = answer.ways.flatMap((way) => way.requests);
  const end = Math.max(...shown.map((request) => request.finish));
  place.replaceChildren(
    ...answer.ways.map((way, index) =>
      drawWay(way, { asked, end, pause: answer.pause_seconds, mode: answer.advice.modes[index] },
        answer.advice.mode === way.mode),
    ),
  );
}

function figure(label, text, good) {
  return el(
    "div",
    { class: "measure" },
    el("b", { class: good ? "good" : "bad" }, `${text} ${good ? "✓" : "✕"}`),
    label,
  );
}

const within = (value, limit) => value !== null && value <= limit;

function drawWay(way, view, advised) {
  const { asked, end, pause, mode } = view;
  const [title, story] = NAMES[way.mode];
  const fleet = mode.prefill_instances
    ? `${mode.prefill_instances} prefill, ${mode.decode_instances} decode`
    : `${mode.decode_instances} instances`;
  const about = el("p", { class: "hint about", "aria-live": "polite" }, "Choose a line for its figures.");
  return el(
    "section",
    { class: `way ${advised ? "advised" : ""}`, "data-mode": way.mode },
    el("h3", {}, title, el("small", {}, advised ? `${fleet} · advised` : fleet)),
    el("p", { class: "hint" }, story),
    el(
      "div",
      { class: "measures" },
      figure("first token, p90", seconds(way.ttft_p90), within(way.ttft_p90, asked.ttft_seconds)),
      figure(
        "per token with hand-off, p90",
        seconds(way.tpot_p90),
        within(way.tpot_p90, asked.tpot_seconds),
      ),
      figure("longest pause, p90", seconds(way.pause_p90), within(way.pause_p90, pause)),
      figure(
        "goodput",
        `${way.goodput.toFixed(1)}/s, ${Math.floor(100 * way.met)} %`,
        way.met >= 0.9,
      ),
    ),
    lanes(way, view, about),
    el("p", { class: "axis" }, el("span", {}, "0"), el("span", {}, "time"), el("span", {}, seconds(end))),
    about,
    el("p", { class: "verdict" }, way.verdict),
  );
}

// The lines of the requests. Pointer, touch or arrow keys choose one, whose figures are shown.
function lanes(way, view, about) {
  const made = el("div", {
    class: "lanes",
    tabindex: "0",
    role: "group",
    "aria-label": `Requests, ${NAMES[way.mode][0]}. Arrow keys choose one.`,
  });
  made.append(...way.requests.map((request) => lane(request, view)));
  let chosen = -1;
  const choose = (index) => {
    made.children[chosen]?.classList.remove("chosen");
    chosen = Math.min(Math.max(index, 0), way.requests.length - 1);
    made.children[chosen].classList.add("chosen");
    about.textContent = said(way.requests[chosen], chosen);
  };
  made.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen + step);
  });
  for (const name of ["pointerover", "click"]) {
    made.addEventListener(name, (event) => {
      const index = [...made.children].indexOf(event.target.closest(".lane"));
      if (index >= 0) choose(index);
    });
  }
  return made;
}

function said(request, index) {
  const first = request.first_token === null ? null : request.first_token - request.arrival;
  const longest = Math.max(0, ...request.gaps.map(([gap]) => gap));
  const missed = request.missed.map((name) => MISSED[name]).join(", ") || "meets all objectives";
  return (
    `Request ${index + 1}: ${count(request.prompt_tokens)} prompt tokens, first token after ` +
    `${seconds(first)}, longest gap ${seconds(longest)}; ${missed}.`
  );
}

function lane(request, { asked, end, pause }) {
  const made = el("div", { class: request.missed.length ? "lane missed" : "lane" });
  const part = (from, to, kind) => {
    const style = { left: `${(100 * from) / end}%`, width: `${(100 * (to - from)) / end}%` };
    made.append(el("i", { class: kind, style }));
  };
  const first = request.first_token ?? request.finish;
  part(request.arrival, first, "before");
  let at = first;
  for (const [gap, times] of request.gaps) {
    const until = at + gap * times;
    part(at, until, gap > pause ? "stall" : gap > asked.tpot_seconds ? "slow" : "flow");
    at = until;
  }
  const due = request.arrival + asked.ttft_seconds;
  if (due < end) made.append(el("i", { class: "due", style: { left: `${(100 * due) / end}%` } }));
  return made;
}
