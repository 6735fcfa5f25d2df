// The page of the API: endpoints and fields of openapi.json.

import { byId, el } from "./dom.js";

function typeOf(schema) {
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((name) => name !== "null").join(" or ");
  if (schema.$ref) return "object";
  if (schema.type === "array") return schema.items.type ? `list of ${schema.items.type}s` : "list";
  return schema.type ?? "any";
}

function fieldsOf(operation) {
  const schema = operation.requestBody?.content["application/json"].schema;
  if (!schema) return [];
  const rows = Object.entries(schema.properties).map(([name, field]) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", {}, name)),
      el("td", {}, typeOf(field)),
      el("td", {}, schema.required.includes(name) ? "required" : ""),
    ),
  );
  return [el("table", {}, el("tbody", {}, ...rows))];
}

function example(path, method, operation) {
  const url = `${location.origin}${path}`;
  if (method !== "post") return `curl ${method === "get" ? "" : "-X DELETE "}${url}`;
  const schema = operation.requestBody?.content["application/json"].schema;
  if (!schema) return `curl -X POST ${url}`;
  const values = {
    messages: [{ role: "user", content: "Hello" }],
    prompt: "Once upon a time",
    input: "Hello",
    tokens: [1],
    max_tokens: 40,
  };
  const names = schema.required.length ? schema.required : Object.keys(values).filter((name) => name === "prompt");
  const body = Object.fromEntries(names.map((name) => [name, values[name]]));
  return `curl ${url} -H 'content-type: application/json' -d '${JSON.stringify(body)}'`;
}

const described = await (await fetch("openapi.json")).json();
byId("version").textContent = described.info.version;
const endpoints = byId("endpoints");
for (const [path, methods] of Object.entries(described.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    endpoints.append(
      el(
        "details",
        {},
        el("summary", {}, el("code", {}, `${method.toUpperCase()} ${path}`), ` ${operation.summary}`),
        el("pre", {}, example(path, method, operation)),
        ...fieldsOf(operation),
      ),
    );
  }
}
