from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_MIXED: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_MIXED: WorkerRole

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "n", "include_stop_str_in_output", "skip_special_tokens", "grammar", "allowed_token_ids", "bad_words", "prompt_logprobs", "thinking_budget")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    n: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    grammar: Grammar
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    prompt_logprobs: int
    thinking_budget: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., prompt_logprobs: _Optional[int] = ..., thinking_budget: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., lark: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("dp", "tp", "ep", "pp")
    DP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    EP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    dp: int
    tp: int
    ep: int
    pp: int
    def __init__(self, dp: _Optional[int] = ..., tp: _Optional[int] = ..., ep: _Optional[int] = ..., pp: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "role", "layout", "free_pages", "total_pages", "running", "waiting", "slots", "page_size", "context_tokens", "draining", "handoffs", "preemptions", "reserved_pages", "queued_tokens", "queued_pairs", "rank_sequences", "rank_contexts", "can_prefill", "chunk_tokens", "free_states", "total_states", "kv_channels", "kept", "links", "times", "kernels", "drafted_tokens", "accepted_tokens", "adapter_slots", "adapters", "priorities", "weights", "asleep", "images")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    RANK_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RANK_CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    CAN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_STATES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STATES_FIELD_NUMBER: _ClassVar[int]
    KV_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: WorkerRole
    layout: str
    free_pages: _containers.RepeatedScalarFieldContainer[int]
    total_pages: _containers.RepeatedScalarFieldContainer[int]
    running: int
    waiting: int
    slots: int
    page_size: int
    context_tokens: int
    draining: bool
    handoffs: int
    preemptions: int
    reserved_pages: _containers.RepeatedScalarFieldContainer[int]
    queued_tokens: int
    queued_pairs: float
    rank_sequences: _containers.RepeatedScalarFieldContainer[int]
    rank_contexts: _containers.RepeatedScalarFieldContainer[int]
    can_prefill: bool
    chunk_tokens: int
    free_states: _containers.RepeatedScalarFieldContainer[int]
    total_states: _containers.RepeatedScalarFieldContainer[int]
    kv_channels: _containers.RepeatedScalarFieldContainer[str]
    kept: _containers.RepeatedCompositeFieldContainer[KeptTier]
    links: _containers.RepeatedCompositeFieldContainer[LinkTimes]
    times: StepTimes
    kernels: _containers.RepeatedScalarFieldContainer[str]
    drafted_tokens: int
    accepted_tokens: int
    adapter_slots: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    priorities: _containers.RepeatedCompositeFieldContainer[PriorityLoad]
    weights: str
    asleep: bool
    images: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., layout: _Optional[str] = ..., free_pages: _Optional[_Iterable[int]] = ..., total_pages: _Optional[_Iterable[int]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots: _Optional[int] = ..., page_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., handoffs: _Optional[int] = ..., preemptions: _Optional[int] = ..., reserved_pages: _Optional[_Iterable[int]] = ..., queued_tokens: _Optional[int] = ..., queued_pairs: _Optional[float] = ..., rank_sequences: _Optional[_Iterable[int]] = ..., rank_contexts: _Optional[_Iterable[int]] = ..., can_prefill: _Optional[bool] = ..., chunk_tokens: _Optional[int] = ..., free_states: _Optional[_Iterable[int]] = ..., total_states: _Optional[_Iterable[int]] = ..., kv_channels: _Optional[_Iterable[str]] = ..., kept: _Optional[_Iterable[_Union[KeptTier, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkTimes, _Mapping]]] = ..., times: _Optional[_Union[StepTimes, _Mapping]] = ..., kernels: _Optional[_Iterable[str]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., adapter_slots: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., priorities: _Optional[_Iterable[_Union[PriorityLoad, _Mapping]]] = ..., weights: _Optional[str] = ..., asleep: _Optional[bool] = ..., images: _Optional[bool] = ...) -> None: ...

class PriorityLoad(_message.Message):
    __slots__ = ("priority", "sequences", "pages", "waiting", "queued_tokens")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    sequences: int
    pages: int
    waiting: int
    queued_tokens: int
    def __init__(self, priority: _Optional[int] = ..., sequences: _Optional[int] = ..., pages: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("chunk_sizes", "chunks", "batch_sizes", "steps")
    CHUNK_SIZES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    chunk_sizes: _containers.RepeatedScalarFieldContainer[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ProgramTime]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[ProgramTime]
    def __init__(self, chunk_sizes: _Optional[_Iterable[int]] = ..., chunks: _Optional[_Iterable[_Union[ProgramTime, _Mapping]]] = ..., batch_sizes: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[ProgramTime, _Mapping]]] = ...) -> None: ...

class ProgramTime(_message.Message):
    __slots__ = ("size", "context_tokens", "seconds")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    size: int
    context_tokens: int
    seconds: float
    def __init__(self, size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class LinkTimes(_message.Message):
    __slots__ = ("sender", "latency_seconds", "byte_seconds")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    sender: str
    latency_seconds: float
    byte_seconds: float
    def __init__(self, sender: _Optional[str] = ..., latency_seconds: _Optional[float] = ..., byte_seconds: _Optional[float] = ...) -> None: ...

class KeptTier(_message.Message):
    __slots__ = ("tier", "blocks", "bytes", "room_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks: int
    bytes: int
    room_bytes: int
    def __init__(self, tier: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., room_bytes: _Optional[int] = ...) -> None: ...
