// The chat: streams from /v1/chat/completions if the model has a chat template, else from
// /v1/completions, and draws the request's timeline while it runs.

import { get, newTrace, post, stream } from "./api.js";
import { byId, count, el, seconds } from "./dom.js";
import { drawTimeline } from "./timeline.js";

const DRAWN_MS = 400;
// Example prompts for models that chat, and for those that complete a text.
const EXAMPLES = {
  chat: ["Tell a story about a dog and a bird.", "Explain prefill and decode in two sentences."],
  text: ["Once upon a time", "One day, a little girl named Rosa", "The dog and the bird were friends"],
};
const SMALL_MODEL_BYTES = 4096; // KV of a token
const LONG_WORDS = "one day a little bird flew over the big blue sea to see a new land ";
// Parts of the context that the long prompt fills; a smaller part is tried if that is too long.
const LONG_PARTS = [0.85, 0.6, 0.4, 0.2];
const state = { chats: null, conversation: [], running: null, context: 0 };

export function setModel(model) {
  state.context = model.context_tokens;
  if (state.chats === model.chat) return;
  state.chats = model.chat;
  byId("small-model").hidden = model.kv_bytes_per_token > SMALL_MODEL_BYTES;
  byId("examples").replaceChildren(
    ...EXAMPLES[model.chat ? "chat" : "text"].map((text) =>
      el("button", { type: "button", class: "quiet", onclick: () => sendExample(text) }, text),
    ),
  );
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
  byId("beside").addEventListener("click", sendBeside);
  byId("clear").addEventListener("click", () => {
    state.running?.abort();
    state.conversation = [];
    byId("messages").replaceChildren();
  });
}

function sendExample(text) {
  if (state.running) return;
  byId("prompt").value = text;
  send();
}

// Sends a long prompt beside the stream that runs, so that its effect on the stream can be seen.
async function sendBeside() {
  const button = byId("beside");
  button.disabled = true;
  const { body, note } = addMessage("mine beside", "A long prompt, sent beside the stream");
  const began = performance.now();
  try {
    const usage = await longPrompt();
    const took = seconds((performance.now() - began) / 1000);
    body.textContent = `A long prompt of ${count(usage.prompt_tokens)} tokens, sent beside the stream`;
    note.textContent = `first token after ${took}`;
  } catch (error) {
    note.textContent = error.message;
  } finally {
    button.disabled = false;
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }
}

async function longPrompt() {
  const fixed = { max_tokens: 1, temperature: 0 };
  for (const part of LONG_PARTS) {
    const words = Math.round((state.context * part) / LONG_WORDS.split(" ").length);
    const prompt = LONG_WORDS.repeat(Math.max(1, words)).trim();
    try {
      return (await post("v1/completions", { ...fixed, prompt })).usage;
    } catch (error) {
      if (part === LONG_PARTS.at(-1) || !/context/.test(error.message)) throw error;
    }
  }
  return null;
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
    byId("messages").scrollTop = byId("messages").scrollHeight;
    drawing.end();
  }
}

async function receive(path, body, traceparent, controller, answer) {
  const began = performance.now();
  const list = byId("messages");
  let [first, text, thoughts, usage] = [null, "", "", null];
  let [last, longest] = [null, 0]; // time of the last piece, and the longest gap between two
  const options = { headers: { traceparent }, signal: controller.signal };
  for await (const event of stream(path, body, options)) {
    usage = event.usage || usage;
    const choice = event.choices[0];
    const piece = choice ? (choice.delta ? choice.delta.content : choice.text) : "";
    const thought = (choice && choice.delta && choice.delta.reasoning_content) || "";
    if (!piece && !thought) continue;
    const now = performance.now();
    first ??= now;
    if (last !== null) longest = Math.max(longest, now - last);
    last = now;
    text += piece || "";
    thoughts += thought;
    const atEnd = list.scrollTop + list.clientHeight > list.scrollHeight - 40;
    answer.body.textContent = text || `(thinking) ${thoughts}`;
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
  answer.note.textContent = summary(usage, began, first, performance.now(), longest);
  return text;
}

function summary(usage, began, first, ended, longest) {
  if (!usage || first === null) return "no text";
  const tokens = usage.completion_tokens;
  const rate = tokens > 1 && ended > first ? ((tokens - 1) * 1000) / (ended - first) : 0;
  const parts = [
    `${count(usage.prompt_tokens)} → ${count(tokens)} tokens`,
    `first after ${seconds((first - began) / 1000)}`,
  ];
  if (rate) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (longest) parts.push(`longest pause ${seconds(longest / 1000)}`);
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
