// The router's last decisions: the chosen workers, the reason and the outcome.

import { byId, count, el, seconds } from "./dom.js";

function placed(decision) {
  if (!decision.decode) return el("span", { class: "state bad" }, "refused");
  if (!decision.prefill) return el("span", {}, decision.decode);
  return el("span", {}, decision.prefill, " → ", decision.decode);
}

function versus(predicted, measured) {
  return el(
    "span",
    { title: "measured; predicted" },
    seconds(measured),
    el("small", {}, predicted === null ? "" : `predicted ${seconds(predicted)}`),
  );
}

const cell = (label, ...children) => el("td", { "data-label": label }, ...children);

function row(decision) {
  return el(
    "tr",
    {},
    cell("Age", seconds(decision.age_seconds)),
    cell("Prompt tokens", count(decision.prompt_tokens)),
    cell("Workers", placed(decision)),
    cell("TTFT", versus(decision.predicted_ttft_seconds, decision.ttft_seconds)),
    cell("TPOT", versus(decision.predicted_step_seconds, decision.tpot_seconds)),
    cell(
      "Timeline",
      decision.trace
        ? el("a", { href: `#/timelines/${decision.trace}` }, "show")
        : el("span", { class: "hint" }, "not traced"),
    ),
    cell("Reason", el("span", { class: "reason" }, `${decision.kind}: ${decision.reason}`)),
  );
}

export function drawDecisions(decisions) {
  const heads = ["Age", "Prompt tokens", "Workers", "TTFT", "TPOT", "Timeline", "Reason"];
  const shown = decisions.length
    ? el(
        "table",
        { class: "wide" },
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...decisions.map(row)),
      )
    : el("p", { class: "hint" }, "No decisions yet. Send a message.");
  byId("decision-list").replaceChildren(shown);
}
