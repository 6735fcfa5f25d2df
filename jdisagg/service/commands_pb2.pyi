from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SampleSpec(_message.Message):
    __slots__ = ("child", "sampling", "stop_ids", "min_position", "prompt_history", "output_history")
    CHILD_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HISTORY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_HISTORY_FIELD_NUMBER: _ClassVar[int]
    child: int
    sampling: _common_pb2.SamplingParams
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    min_position: int
    prompt_history: _containers.RepeatedScalarFieldContainer[int]
    output_history: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, child: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., min_position: _Optional[int] = ..., prompt_history: _Optional[_Iterable[int]] = ..., output_history: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferSpec(_message.Message):
    __slots__ = ("offer_id", "group", "offset", "block_tokens", "groups")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    group: int
    offset: int
    block_tokens: int
    groups: int
    def __init__(self, offer_id: _Optional[int] = ..., group: _Optional[int] = ..., offset: _Optional[int] = ..., block_tokens: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class PrefillRow(_message.Message):
    __slots__ = ("sequence", "rank", "offset", "tokens", "start", "pages", "samples", "offers")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    rank: int
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    start: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleSpec]
    offers: _containers.RepeatedCompositeFieldContainer[OfferSpec]
    def __init__(self, sequence: _Optional[int] = ..., rank: _Optional[int] = ..., offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[_Union[SampleSpec, _Mapping]]] = ..., offers: _Optional[_Iterable[_Union[OfferSpec, _Mapping]]] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("chunk_tokens", "rows", "checksum_key")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_KEY_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    rows: _containers.RepeatedCompositeFieldContainer[PrefillRow]
    checksum_key: int
    def __init__(self, chunk_tokens: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[PrefillRow, _Mapping]]] = ..., checksum_key: _Optional[int] = ...) -> None: ...

class ReleaseOffers(_message.Message):
    __slots__ = ("offer_ids",)
    OFFER_IDS_FIELD_NUMBER: _ClassVar[int]
    offer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ExtractBlock(_message.Message):
    __slots__ = ("offer_id", "rank", "group", "start", "valid_tokens", "block_tokens", "pages", "checksum_key", "groups")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_KEY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    rank: int
    group: int
    start: int
    valid_tokens: int
    block_tokens: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    checksum_key: int
    groups: int
    def __init__(self, offer_id: _Optional[int] = ..., rank: _Optional[int] = ..., group: _Optional[int] = ..., start: _Optional[int] = ..., valid_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., checksum_key: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class ConnectPeer(_message.Message):
    __slots__ = ("peer", "card")
    PEER_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    peer: str
    card: _common_pb2.MeshCard
    def __init__(self, peer: _Optional[str] = ..., card: _Optional[_Union[_common_pb2.MeshCard, _Mapping]] = ...) -> None: ...

class DisconnectPeer(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class PullBlock(_message.Message):
    __slots__ = ("offer_id", "rank", "group", "block_tokens", "deadline_seconds", "peer", "codec", "source_rank", "groups")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    rank: int
    group: int
    block_tokens: int
    deadline_seconds: float
    peer: str
    codec: str
    source_rank: int
    groups: int
    def __init__(self, offer_id: _Optional[int] = ..., rank: _Optional[int] = ..., group: _Optional[int] = ..., block_tokens: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., peer: _Optional[str] = ..., codec: _Optional[str] = ..., source_rank: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class InsertBlock(_message.Message):
    __slots__ = ("offer_id", "rank", "group", "block_tokens", "valid_tokens", "start", "pages", "checksum_key", "peer", "codec", "groups")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_KEY_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    rank: int
    group: int
    block_tokens: int
    valid_tokens: int
    start: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    checksum_key: int
    peer: str
    codec: str
    groups: int
    def __init__(self, offer_id: _Optional[int] = ..., rank: _Optional[int] = ..., group: _Optional[int] = ..., block_tokens: _Optional[int] = ..., valid_tokens: _Optional[int] = ..., start: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., checksum_key: _Optional[int] = ..., peer: _Optional[str] = ..., codec: _Optional[str] = ..., groups: _Optional[int] = ...) -> None: ...

class DropBlocks(_message.Message):
    __slots__ = ("offer_ids",)
    OFFER_IDS_FIELD_NUMBER: _ClassVar[int]
    offer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PageCopy(_message.Message):
    __slots__ = ("rank", "source", "destination")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    source: int
    destination: int
    def __init__(self, rank: _Optional[int] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ...) -> None: ...

class CopyPages(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[PageCopy]
    def __init__(self, copies: _Optional[_Iterable[_Union[PageCopy, _Mapping]]] = ...) -> None: ...

class SlotAdmit(_message.Message):
    __slots__ = ("sequence", "rank", "slot", "token", "position", "limit", "pages", "sample")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    rank: int
    slot: int
    token: int
    position: int
    limit: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    sample: SampleSpec
    def __init__(self, sequence: _Optional[int] = ..., rank: _Optional[int] = ..., slot: _Optional[int] = ..., token: _Optional[int] = ..., position: _Optional[int] = ..., limit: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., sample: _Optional[_Union[SampleSpec, _Mapping]] = ...) -> None: ...

class SlotGrow(_message.Message):
    __slots__ = ("rank", "slot", "limit", "pages")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    slot: int
    limit: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., slot: _Optional[int] = ..., limit: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class RankSlots(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeSteps(_message.Message):
    __slots__ = ("steps", "slots", "shaped", "sampled", "admits", "grows")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SHAPED_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    GROWS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    slots: _containers.RepeatedCompositeFieldContainer[RankSlots]
    shaped: bool
    sampled: bool
    admits: _containers.RepeatedCompositeFieldContainer[SlotAdmit]
    grows: _containers.RepeatedCompositeFieldContainer[SlotGrow]
    def __init__(self, steps: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[RankSlots, _Mapping]]] = ..., shaped: _Optional[bool] = ..., sampled: _Optional[bool] = ..., admits: _Optional[_Iterable[_Union[SlotAdmit, _Mapping]]] = ..., grows: _Optional[_Iterable[_Union[SlotGrow, _Mapping]]] = ...) -> None: ...

class StepCommand(_message.Message):
    __slots__ = ("step", "prefill_chunk", "release_offers", "pull_block", "insert_block", "drop_blocks", "copy_pages", "decode_steps", "extract_block", "connect_peer", "disconnect_peer")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_OFFERS_FIELD_NUMBER: _ClassVar[int]
    PULL_BLOCK_FIELD_NUMBER: _ClassVar[int]
    INSERT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DROP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_PAGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXTRACT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CONNECT_PEER_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_PEER_FIELD_NUMBER: _ClassVar[int]
    step: int
    prefill_chunk: PrefillChunk
    release_offers: ReleaseOffers
    pull_block: PullBlock
    insert_block: InsertBlock
    drop_blocks: DropBlocks
    copy_pages: CopyPages
    decode_steps: DecodeSteps
    extract_block: ExtractBlock
    connect_peer: ConnectPeer
    disconnect_peer: DisconnectPeer
    def __init__(self, step: _Optional[int] = ..., prefill_chunk: _Optional[_Union[PrefillChunk, _Mapping]] = ..., release_offers: _Optional[_Union[ReleaseOffers, _Mapping]] = ..., pull_block: _Optional[_Union[PullBlock, _Mapping]] = ..., insert_block: _Optional[_Union[InsertBlock, _Mapping]] = ..., drop_blocks: _Optional[_Union[DropBlocks, _Mapping]] = ..., copy_pages: _Optional[_Union[CopyPages, _Mapping]] = ..., decode_steps: _Optional[_Union[DecodeSteps, _Mapping]] = ..., extract_block: _Optional[_Union[ExtractBlock, _Mapping]] = ..., connect_peer: _Optional[_Union[ConnectPeer, _Mapping]] = ..., disconnect_peer: _Optional[_Union[DisconnectPeer, _Mapping]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("sequence", "child", "token", "logprobs")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHILD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    child: int
    token: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, sequence: _Optional[int] = ..., child: _Optional[int] = ..., token: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class BlockChecksum(_message.Message):
    __slots__ = ("offer_id", "checksum")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    checksum: int
    def __init__(self, offer_id: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("samples", "checksums")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampledToken]
    checksums: _containers.RepeatedCompositeFieldContainer[BlockChecksum]
    def __init__(self, samples: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., checksums: _Optional[_Iterable[_Union[BlockChecksum, _Mapping]]] = ...) -> None: ...

class RowTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class RankTokens(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowTokens]
    def __init__(self, rows: _Optional[_Iterable[_Union[RowTokens, _Mapping]]] = ...) -> None: ...

class StepLogprobs(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepLogprobs]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepLogprobs, _Mapping]]] = ...) -> None: ...

class RankLogprobs(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    def __init__(self, rows: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ...) -> None: ...

class DecodeResult(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[RankTokens]
    logprobs: _containers.RepeatedCompositeFieldContainer[RankLogprobs]
    def __init__(self, tokens: _Optional[_Iterable[_Union[RankTokens, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[RankLogprobs, _Mapping]]] = ...) -> None: ...

class PullResult(_message.Message):
    __slots__ = ("offer_id", "bytes_moved", "error")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    bytes_moved: int
    error: str
    def __init__(self, offer_id: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class InsertResult(_message.Message):
    __slots__ = ("offer_id", "checksum", "intact")
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    INTACT_FIELD_NUMBER: _ClassVar[int]
    offer_id: int
    checksum: int
    intact: bool
    def __init__(self, offer_id: _Optional[int] = ..., checksum: _Optional[int] = ..., intact: _Optional[bool] = ...) -> None: ...

class ExtractResult(_message.Message):
    __slots__ = ("checksum",)
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    checksum: BlockChecksum
    def __init__(self, checksum: _Optional[_Union[BlockChecksum, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "prefill", "decode", "pull", "done", "insert", "extract")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    INSERT_FIELD_NUMBER: _ClassVar[int]
    EXTRACT_FIELD_NUMBER: _ClassVar[int]
    step: int
    prefill: PrefillResult
    decode: DecodeResult
    pull: PullResult
    done: Done
    insert: InsertResult
    extract: ExtractResult
    def __init__(self, step: _Optional[int] = ..., prefill: _Optional[_Union[PrefillResult, _Mapping]] = ..., decode: _Optional[_Union[DecodeResult, _Mapping]] = ..., pull: _Optional[_Union[PullResult, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., insert: _Optional[_Union[InsertResult, _Mapping]] = ..., extract: _Optional[_Union[ExtractResult, _Mapping]] = ...) -> None: ...
