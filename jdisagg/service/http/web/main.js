// The page: tabs, theme, and periodic updates while it is visible.

import { get } from "./api.js";
import { setModel, startChat } from "./chat.js";
import { drawCluster, measure } from "./cluster.js";
import { drawDecisions } from "./decisions.js";
import { byId, count, el, seconds } from "./dom.js";
import { drawTimeline } from "./timeline.js";

const EVERY_MS = 1000;
const THEME = "jdisagg-theme";
const views = [...document.querySelectorAll(".view")].map((view) => view.id);
let shown = "chat";

// `address`: a view's name, and after a slash the trace of a timeline.
function show(address) {
  const [view, trace] = address.split("/");
  shown = views.includes(view) ? view : "chat";
  for (const id of views) byId(id).hidden = id !== shown;
  for (const tab of document.querySelectorAll("[data-view]")) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === shown));
  }
  if (shown === "timelines" && trace) openTimeline(trace).catch((error) => say(error.message));
  refresh();
}

async function openTimeline(trace) {
  const { spans } = await get(`api/timelines/${trace}`);
  byId("timeline").replaceChildren(drawTimeline(spans));
}

function startTabs() {
  for (const tab of document.querySelectorAll("[data-view]")) {
    tab.addEventListener("click", () => {
      location.hash = `/${tab.dataset.view}`; // not an element's id, so the page does not scroll
    });
  }
  addEventListener("hashchange", () => show(location.hash.slice(2)));
}

function startTheme() {
  const set = (theme) => {
    document.documentElement.dataset.theme = theme;
  };
  const kept = localStorage.getItem(THEME);
  if (kept) set(kept);
  byId("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    const next = dark ? "light" : "dark";
    set(next);
    localStorage.setItem(THEME, next);
  });
}

function say(trouble) {
  byId("trouble").hidden = !trouble;
  byId("trouble").textContent = trouble;
}

function drawHead({ model, ready, version }) {
  const facts = [model.name, model.dtype, model.mode, `${count(model.context_tokens)} tokens`];
  byId("model").textContent = facts.join(" · ");
  byId("model").title = `jdisagg ${version}`;
  byId("ready").textContent = ready ? "ready" : "not ready";
  byId("ready").className = `state ${ready ? "good" : "warn"}`;
}

async function drawTimelines() {
  const { requests } = await get("api/timelines");
  const rows = requests.map((one) =>
    el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: "pick", onclick: () => openTimeline(one.trace) },
        el("b", {}, one.request),
        `${new Date(1000 * one.started).toLocaleTimeString()} · ${seconds(one.seconds)} · ${count(one.prompt_tokens)} prompt tokens · ${one.result}`,
      ),
    ),
  );
  byId("timeline-list").replaceChildren(
    rows.length
      ? el("ul", { class: "picks" }, ...rows)
      : el("p", { class: "hint" }, "No traced requests yet."),
  );
}

let busy = false;
async function refresh() {
  if (busy || document.hidden) return;
  busy = true;
  try {
    const status = await get("api/status");
    drawHead(status);
    setModel(status.model);
    measure(status.traffic);
    if (shown === "cluster") drawCluster(status);
    if (shown === "decisions") drawDecisions(status.decisions);
    if (shown === "timelines") await drawTimelines();
    say("");
  } catch (error) {
    byId("ready").textContent = "no answer";
    byId("ready").className = "state bad";
    say(`The server does not answer: ${error.message}`);
  } finally {
    busy = false;
  }
}

startTheme();
startTabs();
startChat();
show(location.hash.slice(2));
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
