from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelCard(_message.Message):
    __slots__ = ("name", "family", "vocabulary", "context_tokens", "dtype", "kv_bytes_per_token", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    vocabulary: int
    context_tokens: int
    dtype: str
    kv_bytes_per_token: int
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., vocabulary: _Optional[int] = ..., context_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class WorkerCard(_message.Message):
    __slots__ = ("name", "boot_id", "role", "address", "layout", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    boot_id: int
    role: _common_pb2.WorkerRole
    address: str
    layout: _common_pb2.Layout
    model: ModelCard
    def __init__(self, name: _Optional[str] = ..., boot_id: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.WorkerRole, str]] = ..., address: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatCall(_message.Message):
    __slots__ = ("name", "boot_id", "status")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    boot_id: int
    status: _common_pb2.WorkerStatus
    def __init__(self, name: _Optional[str] = ..., boot_id: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class DeregisterCall(_message.Message):
    __slots__ = ("name", "boot_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    boot_id: int
    def __init__(self, name: _Optional[str] = ..., boot_id: _Optional[int] = ...) -> None: ...

class DeregisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
