"""Our data <-> the messages of instance.proto. Knows what `wire` says."""

from jdisagg.errors import InvalidRequestError
from jdisagg.instance.messages import Beat, Begin, Failed, FollowerMessage, Join, LeaderMessage, Ordered, Ready, Reported, Stop
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.service import common_pb2
from jdisagg.service import instance_pb2 as pb
from jdisagg.service.wire_commands import command_from_proto, command_to_proto, result_from_proto, result_to_proto

_WHO = "are all processes of one version?"


def follower_message_to_proto(message: FollowerMessage) -> pb.FollowerMessage:
    match message:
        case Join():
            end = message.end and common_pb2.KvEnd(control=message.end.control, boot_id=message.end.boot_id)
            return pb.FollowerMessage(join=pb.Join(process=message.process, secret=message.secret, end=end))
        case Ready():
            return pb.FollowerMessage(ready=pb.Ready())
        case Reported():
            return pb.FollowerMessage(reported=pb.Reported(number=message.number, result=result_to_proto(message.result)))
        case Failed():
            return pb.FollowerMessage(failed=pb.Failed(number=message.number, message=message.message, fatal=message.fatal))
        case Beat():
            return pb.FollowerMessage(beat=pb.Beat())


def follower_message_from_proto(message: pb.FollowerMessage) -> FollowerMessage:
    match message.WhichOneof("kind"):
        case "join":
            join = message.join
            end = KvEnd(join.end.control, join.end.boot_id) if join.HasField("end") else None
            return Join(join.process, join.secret, end)
        case "ready":
            return Ready()
        case "reported":
            return Reported(message.reported.number, result_from_proto(message.reported.result))
        case "failed":
            return Failed(message.failed.number, message.failed.message, message.failed.fatal)
        case "beat":
            return Beat()
        case _:
            raise InvalidRequestError(f"FollowerMessage.kind must be a known message, got none; {_WHO}")


def leader_message_to_proto(message: LeaderMessage) -> pb.LeaderMessage:
    match message:
        case Ordered():
            return pb.LeaderMessage(ordered=pb.Ordered(number=message.number, command=command_to_proto(message.command)))
        case Begin():
            return pb.LeaderMessage(begin=pb.Begin())
        case Beat():
            return pb.LeaderMessage(beat=pb.Beat())
        case Stop():
            return pb.LeaderMessage(stop=pb.Stop())


def leader_message_from_proto(message: pb.LeaderMessage) -> LeaderMessage:
    match message.WhichOneof("kind"):
        case "ordered":
            return Ordered(message.ordered.number, command_from_proto(message.ordered.command))
        case "begin":
            return Begin()
        case "beat":
            return Beat()
        case "stop":
            return Stop()
        case _:
            raise InvalidRequestError(f"LeaderMessage.kind must be a known message, got none; {_WHO}")
