"""OpenAPI description of the HTTP API, served at /openapi.json and shown by the page /docs.

The fields of an endpoint's requests are those of its forms (`bodies`). A test compares the
endpoints with the routes."""

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from jdisagg import __version__
from jdisagg.service.http import bodies
from jdisagg.service.http.fields import Fields, Form

Json = dict[str, object]

Forms = tuple[type[Form], ...]

_TEXT: Json = {"type": "string"}
_GENERATION = (
    *(bodies.GenerationFields, bodies.HintFields),
    *(bodies.Sampling, bodies.Restriction, bodies.Guided),
)
_CHAT = (bodies.Template, bodies.TemplateArguments)
_MESSAGES = (bodies.MessagesPrompt, bodies.TemplateArguments)
_OF_CHATS = (*_CHAT, *_GENERATION, bodies.Most, bodies.ChatFields)
_OF_RESPONSES = (*_GENERATION, bodies.ResponseFields, bodies.TemplateArguments, bodies.Most)
# For each path and method: a summary, and the forms of the request.
_PATHS: dict[str, dict[str, tuple[str, Forms]]] = {
    "/v1/completions": {
        "post": (
            "Completes prompts.",
            (*_GENERATION, bodies.PromptFields, bodies.Most, bodies.CompletionFields),
        )
    },
    "/v1/chat/completions": {"post": ("Answers a chat.", _OF_CHATS)},
    "/v1/chat/completions/render": {
        "post": ("Shows the prompt and sampling parameters of a chat.", _OF_CHATS)
    },
    "/v1/responses": {"post": ("Answers in the form of responses.", _OF_RESPONSES)},
    "/v1/responses/input_tokens": {
        "post": ("Counts the input tokens of a response.", _OF_RESPONSES)
    },
    "/v1/responses/{id}": {
        "get": ("Returns a kept response.", ()),
        "delete": ("Deletes a kept response.", ()),
    },
    "/v1/responses/{id}/cancel": {"post": ("Cancels a response in the background.", ())},
    "/v1/responses/{id}/input_items": {"get": ("Lists the input of a kept response.", ())},
    "/v1/messages": {
        "post": (
            "Answers in the form of Anthropic's API.",
            (*_MESSAGES, *_GENERATION, bodies.MessagesFields),
        )
    },
    "/v1/messages/count_tokens": {
        "post": ("Counts the input tokens of a message.", (*_MESSAGES, bodies.ModelFields))
    },
    "/v1/models": {"get": ("Lists the served model and its adapters.", ())},
    "/v1/models/{name}": {"get": ("Describes the served model or an adapter.", ())},
    "/v1/load_lora_adapter": {"post": ("Offers a LoRA adapter.", (bodies.LoadAdapter,))},
    "/v1/unload_lora_adapter": {"post": ("Removes a LoRA adapter.", (bodies.UnloadAdapter,))},
    "/update_weights_from_disk": {
        "post": ("Replaces the weights of all workers.", (bodies.UpdateWeights,))
    },
    "/sleep": {"post": ("Frees weights and pages of workers.", (bodies.Sleep, bodies.Wake))},
    "/wake_up": {"post": ("Ends the sleep of workers.", (bodies.Wake,))},
    "/reset_prefix_cache": {"post": ("Clears the prefix caches of all workers.", ())},
    "/v1/sessions/{key}": {
        "get": ("Shows where the KV of a session is.", ()),
        "delete": ("Drops the KV of a session.", ()),
    },
    "/v1/sessions/{key}/prefetch": {"post": ("Brings the KV of a session back to pages.", ())},
    "/is_sleeping": {"get": ("States whether all workers sleep.", ())},
    "/v1/embeddings": {
        "post": ("Embeds inputs, with an embedding model.", (bodies.PromptOnly, bodies.Embed))
    },
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        {
            "post": (
                "Sorts documents by their match with a query, with a reranker.",
                (bodies.PromptOnly, bodies.Rerank),
            )
        },
    ),
    **dict.fromkeys(
        ("/v1/score", "/score"),
        {"post": ("Scores pairs of texts, with a reranker.", (bodies.PromptOnly, bodies.Score))},
    ),
    "/v1/files": {
        "get": ("Lists files of batches.", ()),
        "post": ("Stores a file of a batch.", ()),
    },
    "/v1/files/{id}": {"get": ("Describes a file.", ()), "delete": ("Deletes a file.", ())},
    "/v1/files/{id}/content": {"get": ("Returns the content of a file.", ())},
    "/v1/batches": {
        "get": ("Lists batches.", ()),
        "post": ("Begins a batch.", (bodies.BatchFields,)),
    },
    "/v1/batches/{id}": {"get": ("Describes a batch.", ())},
    "/v1/batches/{id}/cancel": {"post": ("Cancels a batch.", ())},
    "/tokenize": {
        "post": (
            "Converts a prompt or a chat to tokens.",
            (bodies.ModelFields, bodies.PromptFields, *_CHAT, bodies.Tokenize),
        )
    },
    "/detokenize": {"post": ("Converts tokens to text.", (bodies.ModelFields, bodies.Detokenize))},
    "/metrics": {"get": ("Metrics in Prometheus' text format.", ())},
    "/version": {"get": ("The server's version.", ())},
    "/health": {
        method: ("200 if the server is ready, else 503. Needs no key.", ())
        for method in ("get", "post")
    },
    "/livez": {
        method: ("200 while the process runs, also during a drain. Needs no key.", ())
        for method in ("get", "post")
    },
}


@functools.cache
def openapi_json() -> bytes:
    paths = {
        path: {method: _operation(path, *one) for method, one in methods.items()}
        for path, methods in _PATHS.items()
    }
    forms = [form for methods in _PATHS.values() for _, some in methods.values() for form in some]
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "jdisagg",
                "version": __version__,
                "description": "Endpoints and fields are explained in docs/http.md. Values, ranges"
                " and defaults are those of OpenAI's API and of vLLM.",
            },
            "paths": paths,
            "security": [{"bearer": []}, {"key": []}, {}],
            "components": {
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
                "schemas": {"Error": _ERROR, **_components(forms)},
            },
        }
    )


_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": dict.fromkeys(("message", "type", "param", "code"), _TEXT),
        }
    },
}


def schema_of(forms: Forms, exclusive: bool = False) -> Json:
    """Returns the JSON schema of a body with these forms. `exclusive`: whether they exclude each
    other, so that no field is required."""
    schemas = [_components(forms)[form.__name__] for form in forms]
    refused = set() if exclusive else {name for form in forms for name in form.refused}
    shown = {name: field for one in schemas for name, field in one["properties"].items()}
    return {
        "type": "object",
        "properties": {name: one for name, one in sorted(shown.items()) if name not in refused},
        "required": [] if exclusive else [name for one in schemas for name in one["required"]],
    }


def _components(forms: Iterable[type[Form]]) -> dict[str, dict[str, Any]]:
    def hook(kind: type) -> Json:
        return {"type": "object"} if kind is Fields else {"title": "any JSON value"}

    template = "#/components/schemas/{name}"
    return msgspec.json.schema_components(forms, schema_hook=hook, ref_template=template)[1]


def _operation(path: str, summary: str, forms: Forms) -> Json:
    replies: Json = {"application/json": {"schema": {"type": "object"}}}
    if bodies.GenerationFields in forms and path in _STREAMED:
        replies["text/event-stream"] = {"schema": _TEXT}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    made: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "The reply.", "content": replies},
            "default": {"description": "An error.", "content": error},
        },
    }
    if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    if forms:
        schema = schema_of(forms, path == "/tokenize")
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
