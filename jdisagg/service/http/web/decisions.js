// The router's last decisions: whom it placed where, why, and what came of it.

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
    cell("Ago", seconds(decision.age_seconds)),
    cell("Prompt", count(decision.prompt_tokens)),
    cell("Placed", placed(decision)),
    cell("First token", versus(decision.predicted_ttft_seconds, decision.ttft_seconds)),
    cell("Each token", versus(decision.predicted_step_seconds, decision.tpot_seconds)),
    cell("Why", el("span", { class: "reason" }, `${decision.kind}: ${decision.reason}`)),
  );
}

export function drawDecisions(decisions) {
  const heads = ["Ago", "Prompt", "Placed", "First token", "Each token", "Why"];
  const shown = decisions.length
    ? el(
        "table",
        { class: "wide" },
        el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, ...decisions.map(row)),
      )
    : el("p", { class: "hint" }, "The router has decided nothing yet. Send something.");
  byId("decision-list").replaceChildren(shown);
}
