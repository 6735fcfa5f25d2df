"""OpenAPI description of the HTTP API, served at /openapi.json and shown by the page /docs.

The description lists the endpoints with the fields of their requests. A test compares it with the
routes and with the code that reads the fields."""

import functools
from collections.abc import Mapping

import msgspec

from jdisagg import __version__

Json = dict[str, object]

_TYPES: dict[str, Json] = {
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "string": {"type": "string"},
    "object": {"type": "object"},
    "objects": {"type": "array", "items": {"type": "object"}},
    "messages": {
        "description": "Messages with a role and a content: a text, or a list of parts. Parts are"
        " texts, or images as data: URLs or base64.",
        "type": "array",
        "items": {"type": "object"},
    },
    "integers": {"type": "array", "items": {"type": "integer"}},
    "strings": {"type": "array", "items": {"type": "string"}},
    "string or strings": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    },
    "string or objects": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
    },
    "string or object": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    "resumption": {
        "type": "object",
        "properties": {
            "life": {"type": "integer"},
            "number": {"type": "integer"},
            "event_ids": {"type": "array", "items": {"type": "string"}},
        },
    },
    "prompt": {
        "description": "A text, a list of texts, token ids, or a list of such lists.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {}}],
    },
}


def _fields(**names: str) -> dict[str, str]:
    """Returns a mapping from field names to types. Each argument is named after a type, with "_" in
    place of spaces, and lists the fields of this type."""
    return {name: kind.replace("_", " ") for kind, text in names.items() for name in text.split()}


_SAMPLING = _fields(
    number="temperature top_p min_p presence_penalty frequency_penalty repetition_penalty",
    integer="top_k seed min_tokens n best_of",
    boolean="ignore_eos include_stop_str_in_output skip_special_tokens",
    integers="stop_token_ids allowed_token_ids",
    string_or_strings="stop bad_words",
    object="logit_bias structured_outputs response_format",
)
_REQUEST = _fields(
    string="model request_id tenant cache_salt",
    integer="priority",
    number="deadline_seconds",
    boolean="stream return_token_ids return_tokens_as_token_ids",
    object="stream_options",
)
_GENERATION = {**_REQUEST, **_SAMPLING}
_TOOLS = _fields(objects="tools", string_or_object="tool_choice", boolean="parallel_tool_calls")
_TEMPLATE = _fields(
    messages="messages",
    object="chat_template_kwargs",
    boolean="add_generation_prompt continue_final_message",
    string="reasoning_effort",
)
_CHAT = {
    **_GENERATION,
    **_TEMPLATE,
    **_TOOLS,
    **_fields(
        integer="max_tokens max_completion_tokens top_logprobs prompt_logprobs",
        boolean="logprobs",
        resumption="resumption",
    ),
}
_RESPONSE = {
    **_GENERATION,
    **_TOOLS,
    **_fields(
        string_or_objects="input",
        string="instructions previous_response_id",
        integer="max_output_tokens top_logprobs",
        boolean="store background",
        object="text reasoning metadata",
        strings="include",
    ),
}
_MESSAGE = {
    **_GENERATION,
    **_fields(
        messages="messages",
        objects="tools",
        integer="max_tokens",
        object="tool_choice thinking output_config chat_template_kwargs",
        string_or_objects="system",
        strings="stop_sequences",
    ),
}
_COMPLETION = {
    **_GENERATION,
    **_fields(
        prompt="prompt",
        integer="max_tokens logprobs prompt_logprobs",
        boolean="echo",
        resumption="resumption",
    ),
}
_TOKENIZE = {
    **_TEMPLATE,
    **_TOOLS,
    **_fields(string="model", prompt="prompt", boolean="return_token_strs"),
}
_LOAD_ADAPTER = _fields(string="lora_name lora_path", boolean="load_inplace")
_UPDATE_WEIGHTS = _fields(string="model_path weight_version mode", number="deadline_seconds")
_WAKE = _fields(strings="workers", number="deadline_seconds")
_SLEEP = {**_WAKE, **_fields(integer="level")}
_DETOKENIZE = _fields(string="model", integers="tokens", boolean="skip_special_tokens")
# For each path and method: a summary, the fields of the request, and the required fields.
_PATHS: dict[str, dict[str, tuple[str, Mapping[str, str], tuple[str, ...]]]] = {
    "/v1/completions": {"post": ("Completes prompts.", _COMPLETION, ("prompt",))},
    "/v1/chat/completions": {"post": ("Answers a chat.", _CHAT, ("messages",))},
    "/v1/chat/completions/render": {
        "post": ("Shows the prompt and sampling parameters of a chat.", _CHAT, ("messages",))
    },
    "/v1/responses": {"post": ("Answers in the form of responses.", _RESPONSE, ("input",))},
    "/v1/responses/input_tokens": {
        "post": ("Counts the input tokens of a response.", _RESPONSE, ("input",))
    },
    "/v1/responses/{id}": {
        "get": ("Returns a kept response.", {}, ()),
        "delete": ("Deletes a kept response.", {}, ()),
    },
    "/v1/responses/{id}/cancel": {"post": ("Cancels a response in the background.", {}, ())},
    "/v1/responses/{id}/input_items": {"get": ("Lists the input of a kept response.", {}, ())},
    "/v1/messages": {
        "post": ("Answers in the form of Anthropic's API.", _MESSAGE, ("messages", "max_tokens"))
    },
    "/v1/messages/count_tokens": {
        "post": ("Counts the input tokens of a message.", _MESSAGE, ("messages",))
    },
    "/v1/models": {"get": ("Lists the served model and its adapters.", {}, ())},
    "/v1/models/{name}": {"get": ("Describes the served model or an adapter.", {}, ())},
    "/v1/load_lora_adapter": {
        "post": ("Offers a LoRA adapter.", _LOAD_ADAPTER, ("lora_name", "lora_path"))
    },
    "/v1/unload_lora_adapter": {
        "post": ("Removes a LoRA adapter.", {"lora_name": "string"}, ("lora_name",))
    },
    "/update_weights_from_disk": {
        "post": ("Replaces the weights of all workers.", _UPDATE_WEIGHTS, ("model_path",))
    },
    "/sleep": {"post": ("Frees weights and pages of workers.", _SLEEP, ())},
    "/wake_up": {"post": ("Ends the sleep of workers.", _WAKE, ())},
    "/is_sleeping": {"get": ("States whether all workers sleep.", {}, ())},
    "/v1/embeddings": {
        "post": ("Is refused: no embedding model is served.", {"model": "string"}, ())
    },
    "/tokenize": {"post": ("Converts a prompt or a chat to tokens.", _TOKENIZE, ())},
    "/detokenize": {"post": ("Converts tokens to text.", _DETOKENIZE, ("tokens",))},
    "/metrics": {"get": ("Metrics in Prometheus' text format.", {}, ())},
    "/version": {"get": ("The server's version.", {}, ())},
    "/health": {
        method: ("200 if the server is ready, else 503. Needs no key.", {}, ())
        for method in ("get", "post")
    },
    "/livez": {
        method: ("200 while the process runs, also during a drain. Needs no key.", {}, ())
        for method in ("get", "post")
    },
}


@functools.cache
def openapi_json() -> bytes:
    paths = {
        path: {method: _operation(path, *one) for method, one in methods.items()}
        for path, methods in _PATHS.items()
    }
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
                "schemas": {"Error": _ERROR},
            },
        }
    )


_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: _TYPES["string"] for name in ("message", "type", "param", "code")},
        }
    },
}


def _operation(
    path: str, summary: str, fields: Mapping[str, str], required: tuple[str, ...]
) -> Json:
    replies: Json = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in fields and path in _STREAMED:
        replies["text/event-stream"] = {"schema": {"type": "string"}}
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
            {"name": name, "in": "path", "required": True, "schema": _TYPES["string"]}
            for name in names
        ]
    if fields:
        schema: Json = {
            "type": "object",
            "properties": {name: _TYPES[kind] for name, kind in sorted(fields.items())},
            "required": list(required),
        }
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
