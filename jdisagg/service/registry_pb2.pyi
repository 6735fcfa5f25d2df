from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelCard(_message.Message):
    __slots__ = ("name", "family", "vocabulary", "context_tokens", "dtype", "kv_bytes_per_token", "fingerprint", "geometry")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    vocabulary: int
    context_tokens: int
    dtype: str
    kv_bytes_per_token: int
    fingerprint: str
    geometry: CostGeometry
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., vocabulary: _Optional[int] = ..., context_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., fingerprint: _Optional[str] = ..., geometry: _Optional[_Union[CostGeometry, _Mapping]] = ...) -> None: ...

class CostGeometry(_message.Message):
    __slots__ = ("name", "width", "layers", "vocabulary", "attention", "latent", "ffn", "gated", "tied", "experts", "expert_layers", "context_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LATENT_FIELD_NUMBER: _ClassVar[int]
    FFN_FIELD_NUMBER: _ClassVar[int]
    GATED_FIELD_NUMBER: _ClassVar[int]
    TIED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    width: int
    layers: int
    vocabulary: int
    attention: Attention
    latent: LatentAttention
    ffn: int
    gated: bool
    tied: bool
    experts: Experts
    expert_layers: int
    context_tokens: int
    def __init__(self, name: _Optional[str] = ..., width: _Optional[int] = ..., layers: _Optional[int] = ..., vocabulary: _Optional[int] = ..., attention: _Optional[_Union[Attention, _Mapping]] = ..., latent: _Optional[_Union[LatentAttention, _Mapping]] = ..., ffn: _Optional[int] = ..., gated: _Optional[bool] = ..., tied: _Optional[bool] = ..., experts: _Optional[_Union[Experts, _Mapping]] = ..., expert_layers: _Optional[int] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class Attention(_message.Message):
    __slots__ = ("query_heads", "kv_heads", "head_dim", "window", "windowed_layers")
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    query_heads: int
    kv_heads: int
    head_dim: int
    window: int
    windowed_layers: int
    def __init__(self, query_heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ..., windowed_layers: _Optional[int] = ...) -> None: ...

class LatentAttention(_message.Message):
    __slots__ = ("query_heads", "query_rank", "kv_rank", "rope_dim", "nope_dim", "value_dim")
    QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    QUERY_RANK_FIELD_NUMBER: _ClassVar[int]
    KV_RANK_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIM_FIELD_NUMBER: _ClassVar[int]
    NOPE_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    query_heads: int
    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    def __init__(self, query_heads: _Optional[int] = ..., query_rank: _Optional[int] = ..., kv_rank: _Optional[int] = ..., rope_dim: _Optional[int] = ..., nope_dim: _Optional[int] = ..., value_dim: _Optional[int] = ...) -> None: ...

class Experts(_message.Message):
    __slots__ = ("count", "active", "ffn", "shared_ffn")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    FFN_FIELD_NUMBER: _ClassVar[int]
    SHARED_FFN_FIELD_NUMBER: _ClassVar[int]
    count: int
    active: int
    ffn: int
    shared_ffn: int
    def __init__(self, count: _Optional[int] = ..., active: _Optional[int] = ..., ffn: _Optional[int] = ..., shared_ffn: _Optional[int] = ...) -> None: ...

class Accelerator(_message.Message):
    __slots__ = ("name", "peak_flops", "memory_bytes_per_second", "memory_bytes", "domain_devices", "scale_up", "host", "scale_out", "efficiency", "dollars_per_hour")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEAK_FLOPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_DEVICES_FIELD_NUMBER: _ClassVar[int]
    SCALE_UP_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SCALE_OUT_FIELD_NUMBER: _ClassVar[int]
    EFFICIENCY_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    name: str
    peak_flops: float
    memory_bytes_per_second: float
    memory_bytes: float
    domain_devices: int
    scale_up: Link
    host: Link
    scale_out: Link
    efficiency: Efficiency
    dollars_per_hour: float
    def __init__(self, name: _Optional[str] = ..., peak_flops: _Optional[float] = ..., memory_bytes_per_second: _Optional[float] = ..., memory_bytes: _Optional[float] = ..., domain_devices: _Optional[int] = ..., scale_up: _Optional[_Union[Link, _Mapping]] = ..., host: _Optional[_Union[Link, _Mapping]] = ..., scale_out: _Optional[_Union[Link, _Mapping]] = ..., efficiency: _Optional[_Union[Efficiency, _Mapping]] = ..., dollars_per_hour: _Optional[float] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("name", "bytes_per_second", "latency_seconds", "efficiency")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EFFICIENCY_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes_per_second: float
    latency_seconds: float
    efficiency: float
    def __init__(self, name: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., latency_seconds: _Optional[float] = ..., efficiency: _Optional[float] = ...) -> None: ...

class Efficiency(_message.Message):
    __slots__ = ("gemm_compute", "gemm_memory", "attention_compute", "attention_memory", "op_seconds", "attention_seconds", "launch_seconds", "prefill_launch_seconds", "step_seconds", "prefill_seconds", "sequence_seconds", "collective_seconds", "collective_bandwidth", "large_bytes", "large_bandwidth")
    GEMM_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    GEMM_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MEMORY_FIELD_NUMBER: _ClassVar[int]
    OP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LAUNCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    LARGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LARGE_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    gemm_compute: float
    gemm_memory: float
    attention_compute: float
    attention_memory: float
    op_seconds: float
    attention_seconds: float
    launch_seconds: float
    prefill_launch_seconds: float
    step_seconds: float
    prefill_seconds: float
    sequence_seconds: float
    collective_seconds: float
    collective_bandwidth: float
    large_bytes: float
    large_bandwidth: float
    def __init__(self, gemm_compute: _Optional[float] = ..., gemm_memory: _Optional[float] = ..., attention_compute: _Optional[float] = ..., attention_memory: _Optional[float] = ..., op_seconds: _Optional[float] = ..., attention_seconds: _Optional[float] = ..., launch_seconds: _Optional[float] = ..., prefill_launch_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., sequence_seconds: _Optional[float] = ..., collective_seconds: _Optional[float] = ..., collective_bandwidth: _Optional[float] = ..., large_bytes: _Optional[float] = ..., large_bandwidth: _Optional[float] = ...) -> None: ...

class WorkerCard(_message.Message):
    __slots__ = ("name", "boot_id", "role", "address", "layout", "model", "place", "hardware", "stages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    boot_id: int
    role: _common_pb2.WorkerRole
    address: str
    layout: _common_pb2.Layout
    model: ModelCard
    place: str
    hardware: Accelerator
    stages: int
    def __init__(self, name: _Optional[str] = ..., boot_id: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.WorkerRole, str]] = ..., address: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., place: _Optional[str] = ..., hardware: _Optional[_Union[Accelerator, _Mapping]] = ..., stages: _Optional[int] = ...) -> None: ...

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
