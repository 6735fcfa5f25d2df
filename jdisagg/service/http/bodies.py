"""The bodies of HTTP requests: each field is declared here once, with its type, or with the values
of it that have no effect.

`Fields.fill` reads these forms, and `openapi` shows them. A body has several forms, because APIs
share fields. Field names are those of OpenAI's and Anthropic's APIs. For features that these do not
have, they are those of vLLM or SGLang. The fields of sampling follow `SamplingParams`.

Some fields of other servers would change the tokens of an answer, or request content that the reply
cannot have. A request with such a field is refused with an error that names the field. A value
without effect, such as 1 for a factor, is accepted. Known fields that have no meaning in jdisagg
are ignored. Unknown fields are ignored too, and a header of the reply lists them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from jdisagg.chat.messages import MAX_MESSAGES, MAX_TOOLS
from jdisagg.request import MAX_SEED, SamplingOptions, SamplingParams, parameters_of
from jdisagg.service.http.fields import (
    BY_HAND,
    INTEGER,
    SCHEMA_OBJECT,
    TEXT_OR_JSON,
    FieldKind,
    Fields,
    Form,
    Refused,
)

_SAMPLING = "sample with temperature, top_p or top_k"
_KV = "the server moves KV between its own workers"
_MEANS = "send {}".format
REFUSED: Refused = {
    "suffix": (("",), "put all of the preceding text into the prompt"),
    "use_beam_search": ((False,), "use n for several sampled answers"),
    "length_penalty": ((1,), "omit it, since there is no beam search"),
    "spaces_between_special_tokens": ((True, False), "omit it"),
    "truncate_prompt_tokens": ((-1,), "truncate the prompt yourself; /tokenize counts its tokens"),
    "logits_processors": (([],), "use logit_bias"),
    # vLLM's and SGLang's
    "repetition_detection": (({},), "use frequency_penalty or repetition_penalty"),
    "logprob_token_ids": (([],), "ask for the most likely tokens with logprobs"),
    "prompt_embeds": (([],), "send text or token ids"),
    "input_ids": (([],), "send token ids as prompt of /v1/completions"),
    "vllm_xargs": (({},), "omit it, since there are no plug-ins for sampling"),
    "custom_params": (({},), "omit it, since there are no plug-ins for sampling"),
    "custom_logit_processor": (("",), "use logit_bias"),
    "watermark": ((False, {}), "omit it"),
    "watermarking": ((False, {}), "omit it"),
    "stop_regex": (("", []), "send texts as stop"),
    "lora_path": (("",), "load the adapter (/v1/load_lora_adapter) and give its name as model"),
    "session_params": (({},), "send the whole conversation, and its key as session_id"),
    "task": ((), "describe the task in a message"),
    "separate_reasoning": ((True,), "join reasoning_content and content yourself"),
    "stream_reasoning": ((True,), "omit it; reasoning is streamed as it is generated"),
    "include_reasoning": ((True,), "leave reasoning_content out of the reply yourself"),
    "sampling_logprobs_mode": ((), "omit it; log-probabilities precede temperature and filters"),
    "return_hidden_states": ((False,), "omit it"),
    "return_sampling_mask": ((False,), "omit it"),
    "kv_transfer_params": (({},), _KV),
    "ec_transfer_params": (({},), _KV),
    "bootstrap_host": (("", []), _KV),
    "bootstrap_port": (([],), _KV),
    "bootstrap_room": (([],), _KV),
    # other servers' ways to sample
    "do_sample": ((True,), "send temperature 0 for greedy decoding"),
    "num_beams": ((1,), "use n for several sampled answers"),
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), ((), _MEANS("max_tokens"))),
    "min_new_tokens": ((0,), _MEANS("min_tokens")),
    "repeat_penalty": ((1,), _MEANS("repetition_penalty")),
    "repeat_last_n": ((0,), "omit it; repetition_penalty covers prompt and answer"),
    "no_repeat_ngram_size": ((0,), "use repetition_penalty"),
    **dict.fromkeys(("typical_p", "typical", "tfs_z", "tfs"), ((1,), _SAMPLING)),
    **dict.fromkeys(
        (
            *("top_a", "top_n_sigma", "epsilon_cutoff", "eta_cutoff", "mirostat", "mirostat_mode"),
            *("dynatemp_range", "xtc_probability", "dry_multiplier", "smoothing_factor"),
        ),
        ((0, -1), _SAMPLING),
    ),
    "guidance_scale": ((1,), "omit it, since there is no classifier-free guidance"),
    "negative_prompt": (("",), "omit it, since there is no classifier-free guidance"),
}
_WITHOUT_MEANING = (
    *("user", "safety_identifier", "metadata", "store", "service_tier", "verbosity"),
    *("prompt_cache_options", "prediction"),
    # hints for placement, batching and metrics
    *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
    *("stream_interval", "custom_labels", "truncation_side"),
    # settings of images, whose processor is the checkpoint's, and of video and audio
    *("mm_processor_kwargs", "media_io_kwargs", "mm_payload", "return_mm_kwargs"),
    *("images_config", "video_config", "use_audio_in_video"),
    *("max_dynamic_patch", "min_dynamic_patch"),
)


def _count(raw: msgspec.Raw) -> int | None:
    """Decodes the number of log-probabilities to report. Also accepts true (1) and false (None),
    because the field of this name is a boolean in chats."""
    given = bytes(raw)
    if given in (b"true", b"false"):
        return 1 if given == b"true" else None
    return INTEGER.decode(raw)


def _schema(raw: msgspec.Raw) -> str:
    """Decodes a JSON schema, which some clients send as a string that contains JSON."""
    given = bytes(raw)
    if given.startswith(b'"'):
        return _text(raw)
    if not given.startswith((b"{", b"true", b"false")):
        raise msgspec.ValidationError
    return given.decode()


def _structural(raw: msgspec.Raw) -> Mapping[str, object]:
    """Decodes a structural tag, which vLLM's clients send as a string that contains JSON."""
    given = bytes(raw)
    return _plain_object(_text(raw) if given.startswith(b'"') else given)


_text = msgspec.json.Decoder(str).decode
_plain_object = msgspec.json.Decoder(dict[str, object]).decode
_PROMPT = FieldKind(
    "a string, a list of strings, a list of token ids or a list of such lists",
    msgspec.json.Decoder(str | list[str | int | list[int]]).decode,
)
_INPUT = FieldKind(
    "a string or a list of messages",
    msgspec.json.Decoder(str | list[dict[str, msgspec.Raw]]).decode,
)
_DOCUMENTS = FieldKind("a list of objects", msgspec.json.Decoder(list[dict[str, object]]).decode)
SCHEMA = FieldKind("a JSON schema", _schema)
_TAG: FieldKind[Mapping[str, object]] = FieldKind("a structural tag", _structural)

Objects = list[dict[str, object]]
ByHand = Annotated[object, BY_HAND]
Contents = Annotated[str | Objects, BY_HAND]
Choice = Annotated[str | dict[str, object], BY_HAND]
Tools = Annotated[list[Fields], Meta(max_length=MAX_TOOLS)]
JsonSchema = Annotated[str | dict[str, object], SCHEMA]
Arguments = Annotated[str, TEXT_OR_JSON]

# Parameters of sampling whose form differs between APIs.
_OWN = ("max_tokens", "logprobs", "grammar")
# Values lower than engines take.
_LOWEST = {"top_k": -1, "top_p": 0.0, "seed": -MAX_SEED - 1, "thinking_budget": -1}
_TYPES: dict[object, Any] = {
    tuple[str, ...]: str | list[str],
    Sequence[str]: str | list[str],
    tuple[int, ...]: list[int],
    Sequence[int]: list[int],
    tuple[tuple[int, float], ...]: dict[int, float],
}


def _form(
    name: str, fields: list[tuple[str, Any, object]], refused: Refused | None = None
) -> type[Form]:
    made = msgspec.defstruct(name, fields, bases=(Form,), namespace={"refused": refused or {}})
    return cast("type[Form]", made)


def sampling_form(*declared: type) -> type[Form]:
    """Returns the form of the sampling parameters that the fields of `declared` declare."""
    fields: list[tuple[str, Any, object]] = []
    for name, (kind, rule) in (one for some in declared for one in parameters_of(some).items()):
        low, high = _LOWEST.get(name, rule.low), None if rule.low is None else rule.high
        meta = Meta(description=rule.help, ge=low, le=high)
        annotated: Any = Annotated[_TYPES.get(kind, kind), meta]
        if name not in _OWN:
            fields.append((name, annotated | None, None))
    return _form("Sampling", fields)


Sampling = sampling_form(SamplingParams, SamplingOptions)


class Structured(Form):
    """vLLM's `structured_outputs`."""

    refused = {
        "whitespace_pattern": ((), "the model chooses the whitespace within JSON"),
        "disable_additional_properties": ((False,), "write additionalProperties into the schema"),
    }
    json: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool = False
    structural_tag: Annotated[Any, _TAG] | None = None
    disable_any_whitespace: bool = False


GUIDED = "guided_"
# vLLM's older fields, with the same values.
Guided = _form(
    "Guided",
    [(GUIDED + one.name, one.type, one.default) for one in msgspec.structs.fields(Structured)],
    {GUIDED + name: rule for name, rule in Structured.refused.items()},
)


class Restriction(Form):
    """What restricts the answer. The last three fields are SGLang's."""

    response_format: Fields | None = None
    structured_outputs: Structured | None = None
    regex: str | None = None
    json_schema: JsonSchema | None = None
    ebnf: str | None = None


class StreamOptions(Form):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationFields(Form):
    """Fields of every request for an answer."""

    refused = REFUSED
    ignored = _WITHOUT_MEANING
    model: str = ""
    request_id: str | None = None
    rid: str = ""
    tenant: str = ""
    cache_salt: str = ""
    extra_key: str = ""
    deadline_seconds: float | None = None
    priority: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    no_stop_trim: bool | None = None
    best_of: int | None = None

    @property
    def name(self) -> str:
        return self.rid if self.request_id is None else self.request_id

    @property
    def salt(self) -> str:
        return "/".join(filter(None, (self.cache_salt, self.extra_key)))

    @property
    def streaming(self) -> StreamOptions | None:
        return (self.stream_options or StreamOptions()) if self.stream else None


class CacheControl(Form):
    """Anthropic's field of a request or of a block."""

    type: str = "ephemeral"
    ttl: str = "5m"


class AgentHints(Form):
    """Dynamo's hints of an agent, and the time until its next turn."""

    priority: int = 0
    osl: int = 0
    pause_seconds: float = 0.0


class Extensions(Form):
    """Dynamo's extensions."""

    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class HintFields(Form):
    """What a client knows about its request. It changes no token (`hints`)."""

    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    cache_control: CacheControl | None = None
    nvext: Extensions | None = None


class ResumptionFields(Form):
    life: int
    number: int = 0
    event_ids: str | list[str] | None = None


class Most(Form):
    """The newer name of the largest number of tokens, and the older one."""

    max_completion_tokens: int | None = None
    max_tokens: int | None = None


class PromptFields(Form):
    prompt: Annotated[str | list[object], _PROMPT]
    add_special_tokens: bool = True


class CompletionFields(Form):
    """Fields of /v1/completions alone."""

    logprobs: Annotated[int | bool, FieldKind("an integer", _count)] | None = None
    echo: bool = False
    resumption: ResumptionFields | None = None


class ChatFields(Form):
    """Fields of /v1/chat/completions alone."""

    logprobs: bool = False
    top_logprobs: int = 0
    resumption: ResumptionFields | None = None


class Reasoning(Form):
    """OpenRouter's field."""

    refused = {"exclude": ((False,), "leave reasoning_content out of the reply yourself")}
    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class Budget(Form):
    """Other servers' names of `thinking_budget`."""

    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget: int | None = None


class TemplateArguments(Form):
    """Fields that become arguments of the chat template."""

    chat_template_kwargs: dict[str, object] = {}
    enable_thinking: bool | None = None
    thinking: Annotated[bool | dict[str, object], BY_HAND] | None = None


class Template(Form):
    """The chat of a request."""

    refused = {
        "functions": (([],), "send them as tools"),
        "function_call": (("none", "auto"), "send tool_choice"),
        "audio": ((), "only text is generated"),
        "modalities": ((["text"],), "only text is generated"),
        "web_search_options": ((), "the server has no web search"),
        "chat_template": ((), "the model's own template is used"),
        "add_special_tokens": ((False,), "omit it; the chat template writes special tokens"),
        "echo": ((False,), "join the last message and the answer yourself"),
    }
    messages: Annotated[list[Fields], Meta(max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: Annotated[Objects, _DOCUMENTS] | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    tools: Tools = []
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True


class Called(Form):
    """A function that the model called."""

    name: str
    arguments: Arguments = ""


class MessageFields(Form):
    """One message of a chat."""

    refused = {"audio": (([],), "only text is supported; put it into content")}
    role: str
    content: Contents | None = None
    refusal: ByHand | None = None
    reasoning_content: Contents | None = None
    reasoning: Contents | None = None
    tool_calls: list[Fields] = []
    function_call: Called | None = None
    tool_call_id: str = ""
    name: str = ""


class Function(Form):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Annotated[dict[str, object], SCHEMA_OBJECT] | None = None
    returns: dict[str, object] | None = msgspec.field(default=None, name="return")
    strict: bool = False


REFUSED_WITHOUT_STORE: Refused = {
    "previous_response_id": (
        (),
        "the server stores no responses; send the whole conversation as input",
    ),
    "background": ((False,), "wait for the reply"),
}


class ResponseFields(Form):
    """Fields of /v1/responses alone."""

    refused = {
        "conversation": ((), "send the conversation as input, or previous_response_id"),
        "prompt": ((), "send the prompt's text as input"),
        "prompt_logprobs": ((), "use /v1/chat/completions"),
        "return_routed_experts": ((False,), "use /v1/chat/completions"),
        "resumption": ((), "use /v1/chat/completions"),
        # Both values have the same effect: an input that is too long is rejected, never truncated.
        "truncation": (("disabled", "auto"), "shorten the input"),
        "context_management": (([],), "shorten the input"),
        "n": ((1,), "send several requests"),
        "enable_response_messages": ((False,), "read the reply's output"),
        "previous_input_messages": (([],), "send the conversation as input"),
    }
    ignored = ("max_tool_calls",)
    input: Annotated[str | list[dict[str, msgspec.Raw]], _INPUT]
    instructions: str = ""
    previous_response_id: str = ""
    store: Annotated[bool, BY_HAND] | None = None
    background: Annotated[bool, BY_HAND] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] = []
    text: Fields | None = None
    reasoning: Fields | None = None
    tools: Annotated[Objects, BY_HAND] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True


class MessagesPrompt(Form):
    """The chat of a request of /v1/messages."""

    messages: Annotated[list[Fields], Meta(max_length=MAX_MESSAGES)]
    system: Contents | None = None
    tools: Tools = []
    tool_choice: Fields | None = None
    context_management: Fields | None = None
    output_config: Fields | None = None


class MessagesFields(Form):
    """Fields of /v1/messages alone."""

    refused = {
        "n": ((1,), "send several requests"),
        "prompt_logprobs": ((), "use /v1/chat/completions"),
        "return_routed_experts": ((False,), "use /v1/chat/completions"),
        "resumption": ((), "use /v1/chat/completions"),
        "mcp_servers": (([],), "call the servers' tools yourself and send them as tools"),
        "container": ((), "the server runs no code"),
    }
    ignored = ("diagnostics", "inference_geo", "speed", "user_profile_id")
    max_tokens: int
    stop_sequences: str | list[str] | None = None
    output_format: Fields | None = None


class MessagesTool(Form):
    name: str
    input_schema: Annotated[dict[str, object], SCHEMA_OBJECT]
    description: str = ""
    strict: bool = False


class PromptOnly(Form):
    """Fields of requests whose reply has no text of the model."""

    ignored = ("user",)
    model: str = ""
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    deadline_seconds: float | None = None


_TEXTS = FieldKind("a string or a list of strings", msgspec.json.Decoder(str | list[object]).decode)
Texts = Annotated[str | list[object], _TEXTS]


class Rerank(Form):
    """Documents are texts, or objects with a `text`. `instruct` is also named `instruction`."""

    refused = {"max_chunks_per_doc": ((), "send shorter documents")}
    query: str
    documents: Texts
    top_n: int | None = None
    return_documents: bool = True
    instruct: str | None = None
    instruction: str | None = None


class Score(Form):
    text_1: Texts
    text_2: Texts
    instruct: str | None = None
    instruction: str | None = None


class Embed(Form):
    """`input_type` is another name of `prompt_name`."""

    refused = {"truncate_prompt_tokens": ((-1,), "truncate the input yourself")}
    input: Annotated[str | list[object], _PROMPT]
    dimensions: int | None = None
    encoding_format: str = "float"
    prompt_name: str | None = None
    input_type: str | None = None


class BatchFields(Form):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, object] | None = None


class ModelFields(Form):
    model: str = ""


class Tokenize(Form):
    return_token_strs: bool = False


class Detokenize(Form):
    tokens: list[int]
    skip_special_tokens: bool = False


class LoadAdapter(Form):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(Form):
    lora_name: str


class UpdateWeights(Form):
    model_path: str
    weight_version: str = ""
    mode: str = ""
    deadline_seconds: float | None = None


class Wake(Form):
    workers: str | list[str] = []
    deadline_seconds: float | None = None


class Sleep(Form):
    level: int | None = None
