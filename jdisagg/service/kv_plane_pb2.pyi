from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvEnvelope(_message.Message):
    __slots__ = ("sender", "receiver_boot_id", "messages")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    sender: _common_pb2.KvEnd
    receiver_boot_id: int
    messages: _containers.RepeatedCompositeFieldContainer[KvMessage]
    def __init__(self, sender: _Optional[_Union[_common_pb2.KvEnd, _Mapping]] = ..., receiver_boot_id: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[KvMessage, _Mapping]]] = ...) -> None: ...

class KvReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvWanted(_message.Message):
    __slots__ = ("device", "process", "head_shard")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHARD_FIELD_NUMBER: _ClassVar[int]
    device: int
    process: int
    head_shard: int
    def __init__(self, device: _Optional[int] = ..., process: _Optional[int] = ..., head_shard: _Optional[int] = ...) -> None: ...

class KvOpen(_message.Message):
    __slots__ = ("sender_boot_id", "link", "transports")
    SENDER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    sender_boot_id: int
    link: int
    transports: int
    def __init__(self, sender_boot_id: _Optional[int] = ..., link: _Optional[int] = ..., transports: _Optional[int] = ...) -> None: ...

class KvOpened(_message.Message):
    __slots__ = ("link", "address")
    LINK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    link: int
    address: str
    def __init__(self, link: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class KvPullRequest(_message.Message):
    __slots__ = ("pull_id", "offer_id", "sender_boot_id", "link", "transports", "deadline_seconds", "codec", "dtype", "components", "granule", "tokens", "head_size", "head_shards", "wanted", "process", "turn", "address", "pieces")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    GRANULE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHARDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    offer_id: int
    sender_boot_id: int
    link: int
    transports: int
    deadline_seconds: float
    codec: str
    dtype: str
    components: int
    granule: int
    tokens: int
    head_size: int
    head_shards: int
    wanted: _containers.RepeatedCompositeFieldContainer[KvWanted]
    process: int
    turn: int
    address: str
    pieces: _containers.RepeatedCompositeFieldContainer[KvPostedPiece]
    def __init__(self, pull_id: _Optional[int] = ..., offer_id: _Optional[int] = ..., sender_boot_id: _Optional[int] = ..., link: _Optional[int] = ..., transports: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., codec: _Optional[str] = ..., dtype: _Optional[str] = ..., components: _Optional[int] = ..., granule: _Optional[int] = ..., tokens: _Optional[int] = ..., head_size: _Optional[int] = ..., head_shards: _Optional[int] = ..., wanted: _Optional[_Iterable[_Union[KvWanted, _Mapping]]] = ..., process: _Optional[int] = ..., turn: _Optional[int] = ..., address: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[KvPostedPiece, _Mapping]]] = ...) -> None: ...

class KvPostedPiece(_message.Message):
    __slots__ = ("source", "destination", "part")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    source: int
    destination: int
    part: int
    def __init__(self, source: _Optional[int] = ..., destination: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class KvPosted(_message.Message):
    __slots__ = ("pull_id", "link", "address", "heads", "pieces")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    link: int
    address: str
    heads: int
    pieces: _containers.RepeatedCompositeFieldContainer[KvPostedPiece]
    def __init__(self, pull_id: _Optional[int] = ..., link: _Optional[int] = ..., address: _Optional[str] = ..., heads: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[KvPostedPiece, _Mapping]]] = ...) -> None: ...

class KvRefused(_message.Message):
    __slots__ = ("pull_id", "error", "message")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    error: str
    message: str
    def __init__(self, pull_id: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class KvPulled(_message.Message):
    __slots__ = ("pull_id",)
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    def __init__(self, pull_id: _Optional[int] = ...) -> None: ...

class KvWithdraw(_message.Message):
    __slots__ = ("pull_id", "ahead")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    ahead: bool
    def __init__(self, pull_id: _Optional[int] = ..., ahead: _Optional[bool] = ...) -> None: ...

class KvLeave(_message.Message):
    __slots__ = ("link",)
    LINK_FIELD_NUMBER: _ClassVar[int]
    link: int
    def __init__(self, link: _Optional[int] = ...) -> None: ...

class KvMessage(_message.Message):
    __slots__ = ("pull_request", "posted", "refused", "pulled", "withdraw", "leave", "open", "opened")
    PULL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    POSTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    pull_request: KvPullRequest
    posted: KvPosted
    refused: KvRefused
    pulled: KvPulled
    withdraw: KvWithdraw
    leave: KvLeave
    open: KvOpen
    opened: KvOpened
    def __init__(self, pull_request: _Optional[_Union[KvPullRequest, _Mapping]] = ..., posted: _Optional[_Union[KvPosted, _Mapping]] = ..., refused: _Optional[_Union[KvRefused, _Mapping]] = ..., pulled: _Optional[_Union[KvPulled, _Mapping]] = ..., withdraw: _Optional[_Union[KvWithdraw, _Mapping]] = ..., leave: _Optional[_Union[KvLeave, _Mapping]] = ..., open: _Optional[_Union[KvOpen, _Mapping]] = ..., opened: _Optional[_Union[KvOpened, _Mapping]] = ...) -> None: ...
