"""Our data <-> the messages of kv_plane.proto: what the transfer channels of two processes say to each other.

Knows what `wire` says. Knows no transfer engine: the messages are plain data (transfer/kv_messages.py).
"""

from collections.abc import Iterable

from jdisagg.errors import InvalidRequestError
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.service import common_pb2
from jdisagg.service import kv_plane_pb2 as pb
from jdisagg.transfer.kv_messages import (
    KvMessage,
    Leave,
    Open,
    Opened,
    Posted,
    PostedPiece,
    Pulled,
    PullRequest,
    Refused,
    Wanted,
    Withdraw,
)


def envelope_to_proto(sender: KvEnd, receiver_boot_id: int, messages: Iterable[KvMessage]) -> pb.KvEnvelope:
    end = common_pb2.KvEnd(control=sender.control, boot_id=sender.boot_id)
    return pb.KvEnvelope(sender=end, receiver_boot_id=receiver_boot_id, messages=map(kv_message_to_proto, messages))


def sender_from_proto(message: pb.KvEnvelope) -> KvEnd:
    return KvEnd(message.sender.control, message.sender.boot_id)


def kv_message_to_proto(message: KvMessage) -> pb.KvMessage:
    match message:
        case PullRequest():
            return pb.KvMessage(pull_request=_pull_request_to_proto(message))
        case Posted(pull_id, link, address, heads, pieces):
            sent = pb.KvPosted(pull_id=pull_id, link=link, address=address, heads=heads, pieces=_pieces_to_proto(pieces))
            return pb.KvMessage(posted=sent)
        case Refused(pull_id, error, text):
            return pb.KvMessage(refused=pb.KvRefused(pull_id=pull_id, error=error, message=text))
        case Pulled(pull_id):
            return pb.KvMessage(pulled=pb.KvPulled(pull_id=pull_id))
        case Withdraw(pull_id, ahead):
            return pb.KvMessage(withdraw=pb.KvWithdraw(pull_id=pull_id, ahead=ahead))
        case Leave(link):
            return pb.KvMessage(leave=pb.KvLeave(link=link))
        case Open(boot_id, link, transports):
            return pb.KvMessage(open=pb.KvOpen(sender_boot_id=boot_id, link=link, transports=transports))
        case Opened(link, address):
            return pb.KvMessage(opened=pb.KvOpened(link=link, address=address))


def kv_message_from_proto(message: pb.KvMessage) -> KvMessage:
    match message.WhichOneof("kind"):
        case "pull_request":
            return _pull_request_from_proto(message.pull_request)
        case "posted":
            posted = message.posted
            return Posted(posted.pull_id, posted.link, posted.address, posted.heads, _pieces_from_proto(posted.pieces))
        case "refused":
            return Refused(message.refused.pull_id, message.refused.error, message.refused.message)
        case "pulled":
            return Pulled(message.pulled.pull_id)
        case "withdraw":
            return Withdraw(message.withdraw.pull_id, message.withdraw.ahead)
        case "leave":
            return Leave(message.leave.link)
        case "open":
            return Open(message.open.sender_boot_id, message.open.link, message.open.transports)
        case "opened":
            return Opened(message.opened.link, message.opened.address)
    raise InvalidRequestError("KvMessage.kind must be a known kind, got none; are both sides of one version?")


def _pieces_to_proto(pieces: Iterable[PostedPiece]) -> list[pb.KvPostedPiece]:
    return [pb.KvPostedPiece(source=piece.source, destination=piece.destination, part=piece.part) for piece in pieces]


def _pieces_from_proto(pieces: Iterable[pb.KvPostedPiece]) -> tuple[PostedPiece, ...]:
    return tuple(PostedPiece(piece.source, piece.destination, piece.part) for piece in pieces)


def _pull_request_to_proto(request: PullRequest) -> pb.KvPullRequest:
    wanted = (pb.KvWanted(device=want.device, process=want.process, head_shard=want.head_shard) for want in request.wanted)
    return pb.KvPullRequest(
        pull_id=request.pull_id,
        offer_id=request.offer_id,
        sender_boot_id=request.sender_boot_id,
        link=request.link,
        transports=request.transports,
        deadline_seconds=request.deadline_seconds,
        codec=request.codec,
        dtype=request.dtype,
        components=request.components,
        granule=request.granule,
        tokens=request.tokens,
        head_size=request.head_size,
        head_shards=request.head_shards,
        wanted=wanted,
        process=request.process,
        turn=request.turn,
        address=request.address,
        pieces=_pieces_to_proto(request.pieces),
    )


def _pull_request_from_proto(message: pb.KvPullRequest) -> PullRequest:
    return PullRequest(
        pull_id=message.pull_id,
        offer_id=message.offer_id,
        sender_boot_id=message.sender_boot_id,
        link=message.link,
        transports=message.transports,
        deadline_seconds=message.deadline_seconds,
        codec=message.codec,
        dtype=message.dtype,
        components=message.components,
        granule=message.granule,
        tokens=message.tokens,
        head_size=message.head_size,
        head_shards=message.head_shards,
        wanted=tuple(Wanted(want.device, want.process, want.head_shard) for want in message.wanted),
        process=message.process,
        turn=message.turn,
        address=message.address,
        pieces=_pieces_from_proto(message.pieces),
    )
