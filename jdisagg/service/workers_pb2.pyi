from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpanEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_END_UNSPECIFIED: _ClassVar[SpanEnd]
    SPAN_END_STOP: _ClassVar[SpanEnd]
    SPAN_END_LENGTH: _ClassVar[SpanEnd]
    SPAN_END_PREEMPTED: _ClassVar[SpanEnd]
    SPAN_END_MOVED: _ClassVar[SpanEnd]
SPAN_END_UNSPECIFIED: SpanEnd
SPAN_END_STOP: SpanEnd
SPAN_END_LENGTH: SpanEnd
SPAN_END_PREEMPTED: SpanEnd
SPAN_END_MOVED: SpanEnd

class Request(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "stop_ids", "deadline_seconds", "tenant", "priority", "life")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_seconds: float
    tenant: str
    priority: int
    life: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., deadline_seconds: _Optional[float] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., life: _Optional[int] = ...) -> None: ...

class Child(_message.Message):
    __slots__ = ("index", "accepted")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    index: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class ReserveCall(_message.Message):
    __slots__ = ("request", "attempt", "children", "deadline_seconds", "age_seconds", "session_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    request: Request
    attempt: int
    children: _containers.RepeatedCompositeFieldContainer[Child]
    deadline_seconds: float
    age_seconds: float
    session_id: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., attempt: _Optional[int] = ..., children: _Optional[_Iterable[_Union[Child, _Mapping]]] = ..., deadline_seconds: _Optional[float] = ..., age_seconds: _Optional[float] = ..., session_id: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("reservation_id", "worker", "rank", "lease_seconds", "cached_tokens")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    worker: str
    rank: int
    lease_seconds: float
    cached_tokens: int
    def __init__(self, reservation_id: _Optional[int] = ..., worker: _Optional[str] = ..., rank: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class HandoffSource(_message.Message):
    __slots__ = ("worker", "handoff_id", "address", "boot_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    handoff_id: int
    address: str
    boot_id: int
    def __init__(self, worker: _Optional[str] = ..., handoff_id: _Optional[int] = ..., address: _Optional[str] = ..., boot_id: _Optional[int] = ...) -> None: ...

class GenerateCall(_message.Message):
    __slots__ = ("reservation_id", "attempt", "deadline_seconds", "source")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    attempt: int
    deadline_seconds: float
    source: HandoffSource
    def __init__(self, reservation_id: _Optional[int] = ..., attempt: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., source: _Optional[_Union[HandoffSource, _Mapping]] = ...) -> None: ...

class SourceLost(_message.Message):
    __slots__ = ("handoff_id", "kept_tokens", "reason")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff_id: int
    kept_tokens: int
    reason: str
    def __init__(self, handoff_id: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("child", "first_index", "token_ids", "logprobs", "end", "kv_bytes_moved", "exposed_transfer_seconds", "lost", "moving")
    CHILD_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    child: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    end: SpanEnd
    kv_bytes_moved: int
    exposed_transfer_seconds: float
    lost: SourceLost
    moving: HandoffSource
    def __init__(self, child: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., end: _Optional[_Union[SpanEnd, str]] = ..., kv_bytes_moved: _Optional[int] = ..., exposed_transfer_seconds: _Optional[float] = ..., lost: _Optional[_Union[SourceLost, _Mapping]] = ..., moving: _Optional[_Union[HandoffSource, _Mapping]] = ...) -> None: ...

class ResumeCall(_message.Message):
    __slots__ = ("reservation_id", "attempt", "source", "firsts")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRSTS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    attempt: int
    source: HandoffSource
    firsts: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, reservation_id: _Optional[int] = ..., attempt: _Optional[int] = ..., source: _Optional[_Union[HandoffSource, _Mapping]] = ..., firsts: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("from_token",)
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    from_token: int
    def __init__(self, from_token: _Optional[int] = ...) -> None: ...

class SpansCall(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class StartCall(_message.Message):
    __slots__ = ("session_id", "call")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    call: GenerateCall
    def __init__(self, session_id: _Optional[int] = ..., call: _Optional[_Union[GenerateCall, _Mapping]] = ...) -> None: ...

class StartReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReservationSpans(_message.Message):
    __slots__ = ("reservation_id", "spans", "ended", "error")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    ended: bool
    error: _common_pb2.ErrorStatus
    def __init__(self, reservation_id: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., ended: _Optional[bool] = ..., error: _Optional[_Union[_common_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class SpanBatch(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[ReservationSpans]
    def __init__(self, reservations: _Optional[_Iterable[_Union[ReservationSpans, _Mapping]]] = ...) -> None: ...

class CancelCall(_message.Message):
    __slots__ = ("reservation_id", "child")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    child: int
    def __init__(self, reservation_id: _Optional[int] = ..., child: _Optional[int] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillCall(_message.Message):
    __slots__ = ("request", "attempt", "children", "handoff_id", "destination", "from_token", "deadline_seconds", "age_seconds")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    attempt: int
    children: _containers.RepeatedCompositeFieldContainer[Child]
    handoff_id: int
    destination: str
    from_token: int
    deadline_seconds: float
    age_seconds: float
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., attempt: _Optional[int] = ..., children: _Optional[_Iterable[_Union[Child, _Mapping]]] = ..., handoff_id: _Optional[int] = ..., destination: _Optional[str] = ..., from_token: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("child", "token_id", "logprobs")
    CHILD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    child: int
    token_id: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, child: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("tokens", "queue_seconds", "prefill_seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    queue_seconds: float
    prefill_seconds: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ...) -> None: ...

class CancelPrefillCall(_message.Message):
    __slots__ = ("handoff_id",)
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: int
    def __init__(self, handoff_id: _Optional[int] = ...) -> None: ...

class CancelPrefillReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("protocol", "worker", "model_fingerprint", "kv_layers", "kv_dtype", "layer_groups", "boot_id", "checksum_key", "mesh", "block_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_KEY_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    model_fingerprint: str
    kv_layers: str
    kv_dtype: str
    layer_groups: int
    boot_id: int
    checksum_key: int
    mesh: _common_pb2.MeshCard
    block_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_layers: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., layer_groups: _Optional[int] = ..., boot_id: _Optional[int] = ..., checksum_key: _Optional[int] = ..., mesh: _Optional[_Union[_common_pb2.MeshCard, _Mapping]] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class OffersCall(_message.Message):
    __slots__ = ("handoff_id", "attempt")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: int
    attempt: int
    def __init__(self, handoff_id: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("offer_id", "group", "start", "valid_tokens", "block_tokens", "rank", "groups")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    group: int
    start: int
    valid_tokens: int
    block_tokens: int
    rank: int
    groups: int
    def __init__(self, offer_id: _Optional[int] = ..., group: _Optional[int] = ..., start: _Optional[int] = ..., valid_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., rank: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class HandoffEnd(_message.Message):
    __slots__ = ("offers", "tokens", "firsts", "moved")
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRSTS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    offers: int
    tokens: int
    firsts: _containers.RepeatedCompositeFieldContainer[FirstToken]
    moved: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offers: _Optional[int] = ..., tokens: _Optional[int] = ..., firsts: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., moved: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferChecksum(_message.Message):
    __slots__ = ("offer_id", "checksum")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    checksum: int
    def __init__(self, offer_id: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class OfferOrEnd(_message.Message):
    __slots__ = ("offer", "end", "checksum")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    end: HandoffEnd
    checksum: OfferChecksum
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., end: _Optional[_Union[HandoffEnd, _Mapping]] = ..., checksum: _Optional[_Union[OfferChecksum, _Mapping]] = ...) -> None: ...

class AcknowledgeCall(_message.Message):
    __slots__ = ("handoff_id", "offer_ids")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    OFFER_IDS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: int
    offer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handoff_id: _Optional[int] = ..., offer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AcknowledgeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortCall(_message.Message):
    __slots__ = ("handoff_id", "reason")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff_id: int
    reason: str
    def __init__(self, handoff_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
