from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SwitchState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SWITCH_STATE_UNSPECIFIED: _ClassVar[SwitchState]
    SWITCH_STATE_NONE: _ClassVar[SwitchState]
    SWITCH_STATE_DRAINING: _ClassVar[SwitchState]
    SWITCH_STATE_DONE: _ClassVar[SwitchState]
    SWITCH_STATE_FAILED: _ClassVar[SwitchState]
SWITCH_STATE_UNSPECIFIED: SwitchState
SWITCH_STATE_NONE: SwitchState
SWITCH_STATE_DRAINING: SwitchState
SWITCH_STATE_DONE: SwitchState
SWITCH_STATE_FAILED: SwitchState

class SwitchRoleCall(_message.Message):
    __slots__ = ("switch_id", "role", "layout")
    SWITCH_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    switch_id: int
    role: _common_pb2.WorkerRole
    layout: _common_pb2.Layout
    def __init__(self, switch_id: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.WorkerRole, str]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ...) -> None: ...

class SwitchRoleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchReportCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchReport(_message.Message):
    __slots__ = ("worker", "boot_id", "role", "layout", "state", "switch_id", "reason", "drain_seconds", "build_seconds", "warm_up_seconds", "total_seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SWITCH_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUILD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    boot_id: int
    role: _common_pb2.WorkerRole
    layout: _common_pb2.Layout
    state: SwitchState
    switch_id: int
    reason: str
    drain_seconds: float
    build_seconds: float
    warm_up_seconds: float
    total_seconds: float
    def __init__(self, worker: _Optional[str] = ..., boot_id: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.WorkerRole, str]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., state: _Optional[_Union[SwitchState, str]] = ..., switch_id: _Optional[int] = ..., reason: _Optional[str] = ..., drain_seconds: _Optional[float] = ..., build_seconds: _Optional[float] = ..., warm_up_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class SwitchWorkerCall(_message.Message):
    __slots__ = ("worker", "role", "layout", "deadline_seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: _common_pb2.WorkerRole
    layout: _common_pb2.Layout
    deadline_seconds: float
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.WorkerRole, str]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class AdviceCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Advice(_message.Message):
    __slots__ = ("prefill", "decode", "prefill_now", "decode_now", "prefill_need", "decode_need", "reason", "elastic", "decision", "ttft_attainment", "tpot_attainment", "ttft_quantile_seconds", "tpot_quantile_seconds", "requests_per_second", "slo_ttft_seconds", "slo_tpot_seconds", "slo_quantile")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NOW_FIELD_NUMBER: _ClassVar[int]
    DECODE_NOW_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NEED_FIELD_NUMBER: _ClassVar[int]
    DECODE_NEED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ELASTIC_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    TTFT_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    TPOT_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    TTFT_QUANTILE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TPOT_QUANTILE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLO_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    prefill_now: int
    decode_now: int
    prefill_need: float
    decode_need: float
    reason: str
    elastic: bool
    decision: str
    ttft_attainment: float
    tpot_attainment: float
    ttft_quantile_seconds: float
    tpot_quantile_seconds: float
    requests_per_second: float
    slo_ttft_seconds: float
    slo_tpot_seconds: float
    slo_quantile: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., prefill_now: _Optional[int] = ..., decode_now: _Optional[int] = ..., prefill_need: _Optional[float] = ..., decode_need: _Optional[float] = ..., reason: _Optional[str] = ..., elastic: _Optional[bool] = ..., decision: _Optional[str] = ..., ttft_attainment: _Optional[float] = ..., tpot_attainment: _Optional[float] = ..., ttft_quantile_seconds: _Optional[float] = ..., tpot_quantile_seconds: _Optional[float] = ..., requests_per_second: _Optional[float] = ..., slo_ttft_seconds: _Optional[float] = ..., slo_tpot_seconds: _Optional[float] = ..., slo_quantile: _Optional[float] = ...) -> None: ...
