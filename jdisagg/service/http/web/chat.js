// The chat: streams from /v1/chat/completions if the model has a chat template, else from
// /v1/completions, and draws the request's timeline while it runs.

import { get, newTrace, stream } from "./api.js";
import { byId, count, el, seconds } from "./dom.js";
import { drawTimeline } from "./timeline.js";

const DRAWN_MS = 400;
const state = { chats: false, conversation: [], running: null };

export function setModel(model) {
  state.chats = model.chat;
  byId("prompt").placeholder = model.chat ? "Write a message" : "Once upon a time";
}

export function startChat() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (state.running) state.running.abort();
    else send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  byId("clear").addEventListener("click", () => {
    state.running?.abort();
    state.conversation = [];
    byId("messages").replaceChildren();
  });
}

function addMessage(kind, text) {
  const body = el("div", { class: "text" }, text);
  const note = el("p", { class: "note" });
  const list = byId("messages");
  list.append(el("article", { class: `message ${kind}` }, body, note));
  list.scrollTop = list.scrollHeight;
  return { body, note };
}

function request(prompt) {
  const options = {
    max_tokens: Number(byId("max-tokens").value) || undefined,
    temperature: Number(byId("temperature").value),
    stream_options: { include_usage: true },
  };
  if (!state.chats) return ["v1/completions", { ...options, prompt }];
  state.conversation.push({ role: "user", content: prompt });
  return ["v1/chat/completions", { ...options, messages: state.conversation }];
}

async function send() {
  const prompt = byId("prompt").value;
  if (!prompt.trim()) return;
  byId("prompt").value = "";
  addMessage("mine", prompt);
  const answer = addMessage("answer", "");
  const [path, body] = request(prompt);
  const { trace, header } = newTrace();
  const controller = (state.running = new AbortController());
  byId("send").textContent = "Stop";
  const drawing = watch(trace, controller);
  try {
    const text = await receive(path, body, header, controller, answer);
    if (state.chats) state.conversation.push({ role: "assistant", content: text });
  } catch (error) {
    if (state.chats) state.conversation.pop();
    answer.note.textContent = controller.signal.aborted ? "stopped" : error.message;
    if (!controller.signal.aborted) answer.note.classList.add("bad");
  } finally {
    state.running = null;
    byId("send").textContent = "Send";
    drawing.end();
  }
}

async function receive(path, body, traceparent, controller, answer) {
  const began = performance.now();
  const list = byId("messages");
  let [first, text, thoughts, usage] = [null, "", "", null];
  const options = { headers: { traceparent }, signal: controller.signal };
  for await (const event of stream(path, body, options)) {
    usage = event.usage || usage;
    const choice = event.choices[0];
    const piece = choice ? (choice.delta ? choice.delta.content : choice.text) : "";
    const thought = (choice && choice.delta && choice.delta.reasoning_content) || "";
    if (!piece && !thought) continue;
    first ??= performance.now();
    text += piece || "";
    thoughts += thought;
    const atEnd = list.scrollTop + list.clientHeight > list.scrollHeight - 40;
    answer.body.textContent = text || `(thinking) ${thoughts}`;
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
  answer.note.textContent = summary(usage, began, first, performance.now());
  return text;
}

function summary(usage, began, first, ended) {
  if (!usage || first === null) return "no text";
  const tokens = usage.completion_tokens;
  const rate = tokens > 1 && ended > first ? ((tokens - 1) * 1000) / (ended - first) : 0;
  const parts = [
    `${count(usage.prompt_tokens)} → ${count(tokens)} tokens`,
    `first after ${seconds((first - began) / 1000)}`,
  ];
  if (rate) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  return parts.join(" · ");
}

// Redraws a trace periodically until `end`, and once more when it is complete.
function watch(trace, controller) {
  let over = false;
  const place = byId("live-timeline");
  const draw = async () => {
    if (state.running && state.running !== controller) return; // another request is shown
    const { spans } = await get(`api/timelines/${trace}`);
    if (spans.length) place.replaceChildren(drawTimeline(spans));
  };
  const timer = setInterval(() => draw().catch(() => {}), DRAWN_MS);
  return {
    end() {
      if (over) return;
      over = true;
      clearInterval(timer);
      setTimeout(() => draw().catch(() => {}), DRAWN_MS / 2);
    },
  };
}
