// Requests to the server: JSON and streams of server-sent events. This is the only code that uses
// the network, and it only contacts the server that the page came from.

import { byId } from "./dom.js";

const KEPT = "jdisagg-token";
let token = sessionStorage.getItem(KEPT) || "";
let asking = null;

// Resolves when the user has entered a token. Concurrent calls share one dialog.
function askForToken() {
  if (!asking) {
    const dialog = byId("token-dialog");
    asking = new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(), { once: true });
      dialog.showModal();
    }).then(() => {
      asking = null;
      token = byId("token").value.trim();
      byId("token").value = "";
      sessionStorage.setItem(KEPT, token);
    });
  }
  return asking;
}

async function reasonOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `${reply.status} ${reply.statusText}`;
  }
}

async function ask(path, options = {}) {
  for (;;) {
    const shown = token;
    const headers = { ...options.headers };
    if (shown) headers.authorization = `Bearer ${shown}`;
    const reply = await fetch(path, { ...options, headers });
    if (reply.status === 401) {
      if (shown === token) await askForToken();
      continue;
    }
    if (!reply.ok) throw new Error(await reasonOf(reply));
    return reply;
  }
}

export const get = async (path) => (await ask(path)).json();

const posted = (body, options) => ({
  method: "POST",
  body: JSON.stringify(body),
  ...options,
  headers: { "content-type": "application/json", ...options.headers },
});

export const post = async (path, body, options = {}) =>
  (await ask(path, posted(body, options))).json();

// Yields each event of a streamed reply. Throws the server's error.
export async function* stream(path, body, options = {}) {
  const reply = await ask(path, posted({ ...body, stream: true }, options));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Makes a W3C trace context, which makes the server trace this request.
export function newTrace() {
  const hex = (bytes) =>
    Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (byte) =>
      byte.toString(16).padStart(2, "0"),
    ).join("");
  const trace = hex(16);
  return { trace, header: `00-${trace}-${hex(8)}-01` };
}
