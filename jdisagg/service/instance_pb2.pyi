from jdisagg.service import commands_pb2 as _commands_pb2
from jdisagg.service import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Join(_message.Message):
    __slots__ = ("process", "secret", "end")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    process: int
    secret: int
    end: _common_pb2.KvEnd
    def __init__(self, process: _Optional[int] = ..., secret: _Optional[int] = ..., end: _Optional[_Union[_common_pb2.KvEnd, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reported(_message.Message):
    __slots__ = ("number", "result")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    number: int
    result: _commands_pb2.StepResult
    def __init__(self, number: _Optional[int] = ..., result: _Optional[_Union[_commands_pb2.StepResult, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("number", "message", "fatal")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    number: int
    message: str
    fatal: bool
    def __init__(self, number: _Optional[int] = ..., message: _Optional[str] = ..., fatal: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowerMessage(_message.Message):
    __slots__ = ("join", "ready", "reported", "failed", "beat")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    join: Join
    ready: Ready
    reported: Reported
    failed: Failed
    beat: Beat
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., reported: _Optional[_Union[Reported, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ordered(_message.Message):
    __slots__ = ("number", "command")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    number: int
    command: _commands_pb2.StepCommand
    def __init__(self, number: _Optional[int] = ..., command: _Optional[_Union[_commands_pb2.StepCommand, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaderMessage(_message.Message):
    __slots__ = ("ordered", "begin", "beat", "stop")
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ordered: Ordered
    begin: Begin
    beat: Beat
    stop: Stop
    def __init__(self, ordered: _Optional[_Union[Ordered, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...
