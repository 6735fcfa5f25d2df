"""Our data <-> the messages of commands.proto: every step command and step result.

Knows what `wire` says. Their bytes are what a recording or a broadcast holds.
"""

from collections.abc import Iterable

from jdisagg.errors import InvalidRequestError
from jdisagg.request import TokenLogprobs
from jdisagg.scheduler.commands import (
    BlockChecksum,
    ConnectPeer,
    CopyPages,
    DecodeResult,
    DecodeSteps,
    DisconnectPeer,
    Done,
    DropBlocks,
    ExtractBlock,
    ExtractResult,
    InsertBlock,
    InsertResult,
    OfferSpec,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    PullBlock,
    PullResult,
    ReleaseOffers,
    SampledToken,
    SampleSpec,
    SlotAdmit,
    SlotGrow,
    StepCommand,
    StepResult,
)
from jdisagg.service import commands_pb2 as pb
from jdisagg.service.wire import (
    logprobs_from_proto,
    logprobs_to_proto,
    mesh_card_from_proto,
    mesh_card_to_proto,
    parse,
    sampling_from_proto,
    sampling_to_proto,
)


def command_to_bytes(command: StepCommand) -> bytes:
    return command_to_proto(command).SerializeToString()


def command_from_bytes(data: bytes) -> StepCommand:
    return command_from_proto(parse(pb.StepCommand, data))


def result_to_bytes(result: StepResult) -> bytes:
    return result_to_proto(result).SerializeToString()


def result_from_bytes(data: bytes) -> StepResult:
    return result_from_proto(parse(pb.StepResult, data))


def command_to_proto(command: StepCommand) -> pb.StepCommand:
    step = command.step
    match command:
        case PrefillChunk():
            chunk = pb.PrefillChunk(
                chunk_tokens=command.chunk_tokens, rows=map(_row_to_proto, command.rows), checksum_key=command.checksum_key
            )
            return pb.StepCommand(step=step, prefill_chunk=chunk)
        case ReleaseOffers():
            return pb.StepCommand(step=step, release_offers=pb.ReleaseOffers(offer_ids=command.offer_ids))
        case ExtractBlock():
            extract = pb.ExtractBlock(
                offer_id=command.offer_id,
                rank=command.rank,
                group=command.group,
                start=command.start,
                valid_tokens=command.valid_tokens,
                block_tokens=command.block_tokens,
                pages=command.pages,
                checksum_key=command.checksum_key,
                groups=command.groups,
            )
            return pb.StepCommand(step=step, extract_block=extract)
        case ConnectPeer():
            return pb.StepCommand(step=step, connect_peer=pb.ConnectPeer(peer=command.peer, card=mesh_card_to_proto(command.card)))
        case DisconnectPeer():
            return pb.StepCommand(step=step, disconnect_peer=pb.DisconnectPeer(peer=command.peer))
        case PullBlock():
            pull = pb.PullBlock(
                offer_id=command.offer_id,
                rank=command.rank,
                group=command.group,
                block_tokens=command.block_tokens,
                deadline_seconds=command.deadline_seconds,
                peer=command.peer,
                codec=command.codec,
                source_rank=command.source_rank,
                groups=command.groups,
            )
            return pb.StepCommand(step=step, pull_block=pull)
        case InsertBlock():
            insert = pb.InsertBlock(
                offer_id=command.offer_id,
                rank=command.rank,
                group=command.group,
                block_tokens=command.block_tokens,
                valid_tokens=command.valid_tokens,
                start=command.start,
                pages=command.pages,
                checksum_key=command.checksum_key,
                peer=command.peer,
                codec=command.codec,
                groups=command.groups,
            )
            return pb.StepCommand(step=step, insert_block=insert)
        case DropBlocks():
            return pb.StepCommand(step=step, drop_blocks=pb.DropBlocks(offer_ids=command.offer_ids))
        case CopyPages():
            copies = [pb.PageCopy(rank=rank, source=source, destination=destination) for rank, source, destination in command.copies]
            return pb.StepCommand(step=step, copy_pages=pb.CopyPages(copies=copies))
        case DecodeSteps():
            return pb.StepCommand(step=step, decode_steps=_decode_to_proto(command))


def command_from_proto(message: pb.StepCommand) -> StepCommand:
    step = message.step
    match message.WhichOneof("kind"):
        case "prefill_chunk":
            chunk = message.prefill_chunk
            return PrefillChunk(step, chunk.chunk_tokens, tuple(map(_row_from_proto, chunk.rows)), chunk.checksum_key)
        case "release_offers":
            return ReleaseOffers(step, tuple(message.release_offers.offer_ids))
        case "extract_block":
            extract = message.extract_block
            return ExtractBlock(
                step=step,
                offer_id=extract.offer_id,
                rank=extract.rank,
                group=extract.group,
                start=extract.start,
                valid_tokens=extract.valid_tokens,
                block_tokens=extract.block_tokens,
                pages=tuple(extract.pages),
                checksum_key=extract.checksum_key,
                groups=extract.groups,
            )
        case "connect_peer":
            return ConnectPeer(step, message.connect_peer.peer, mesh_card_from_proto(message.connect_peer.card))
        case "disconnect_peer":
            return DisconnectPeer(step, message.disconnect_peer.peer)
        case "pull_block":
            pull = message.pull_block
            return PullBlock(
                step=step,
                offer_id=pull.offer_id,
                rank=pull.rank,
                group=pull.group,
                block_tokens=pull.block_tokens,
                deadline_seconds=pull.deadline_seconds,
                peer=pull.peer,
                codec=pull.codec,
                source_rank=pull.source_rank,
                groups=pull.groups,
            )
        case "insert_block":
            insert = message.insert_block
            return InsertBlock(
                step=step,
                offer_id=insert.offer_id,
                rank=insert.rank,
                group=insert.group,
                block_tokens=insert.block_tokens,
                valid_tokens=insert.valid_tokens,
                start=insert.start,
                pages=tuple(insert.pages),
                checksum_key=insert.checksum_key,
                peer=insert.peer,
                codec=insert.codec,
                groups=insert.groups,
            )
        case "drop_blocks":
            return DropBlocks(step, tuple(message.drop_blocks.offer_ids))
        case "copy_pages":
            return CopyPages(step, tuple((copy.rank, copy.source, copy.destination) for copy in message.copy_pages.copies))
        case "decode_steps":
            return _decode_from_proto(step, message.decode_steps)
        case _:
            raise InvalidRequestError("StepCommand.kind must be a known command, got none; are both sides of one version?")


def result_to_proto(result: StepResult) -> pb.StepResult:
    step = result.step
    match result:
        case PrefillResult():
            sums = map(_checksum_to_proto, result.checksums)
            return pb.StepResult(step=step, prefill=pb.PrefillResult(samples=map(_sampled_to_proto, result.samples), checksums=sums))
        case DecodeResult():
            tokens = [pb.RankTokens(rows=[pb.RowTokens(tokens=row) for row in rows]) for rows in result.tokens]
            logprobs = [pb.RankLogprobs(rows=map(_row_logprobs_to_proto, rows)) for rows in result.logprobs]
            return pb.StepResult(step=step, decode=pb.DecodeResult(tokens=tokens, logprobs=logprobs))
        case PullResult():
            pull = pb.PullResult(offer_id=result.offer_id, bytes_moved=result.bytes_moved, error=result.error)
            return pb.StepResult(step=step, pull=pull)
        case InsertResult():
            insert = pb.InsertResult(offer_id=result.offer_id, checksum=result.checksum, intact=result.intact)
            return pb.StepResult(step=step, insert=insert)
        case ExtractResult():
            return pb.StepResult(step=step, extract=pb.ExtractResult(checksum=_checksum_to_proto(result.checksum)))
        case Done():
            return pb.StepResult(step=step, done=pb.Done())


def result_from_proto(message: pb.StepResult) -> StepResult:
    step = message.step
    match message.WhichOneof("kind"):
        case "prefill":
            prefill = message.prefill
            return PrefillResult(
                step, tuple(map(_sampled_from_proto, prefill.samples)), tuple(map(_checksum_from_proto, prefill.checksums))
            )
        case "decode":
            decode = message.decode
            tokens = tuple(tuple(tuple(row.tokens) for row in rank.rows) for rank in decode.tokens)
            logprobs = tuple(tuple(map(_row_logprobs_from_proto, rank.rows)) for rank in decode.logprobs)
            return DecodeResult(step, tokens, logprobs)
        case "pull":
            return PullResult(step, message.pull.offer_id, message.pull.bytes_moved, message.pull.error)
        case "insert":
            return InsertResult(step, message.insert.offer_id, message.insert.checksum, message.insert.intact)
        case "extract":
            return ExtractResult(step, _checksum_from_proto(message.extract.checksum))
        case "done":
            return Done(step)
        case _:
            raise InvalidRequestError("StepResult.kind must be a known result, got none; are both sides of one version?")


def _sample_to_proto(sample: SampleSpec) -> pb.SampleSpec:
    return pb.SampleSpec(
        child=sample.child,
        sampling=sampling_to_proto(sample.sampling),
        stop_ids=sample.stop_ids,
        min_position=sample.min_position,
        prompt_history=sample.prompt_history,
        output_history=sample.output_history,
    )


def _sample_from_proto(message: pb.SampleSpec) -> SampleSpec:
    return SampleSpec(
        child=message.child,
        sampling=sampling_from_proto(message.sampling),
        stop_ids=tuple(message.stop_ids),
        min_position=message.min_position,
        prompt_history=tuple(message.prompt_history),
        output_history=tuple(message.output_history),
    )


def _row_to_proto(row: PrefillRow) -> pb.PrefillRow:
    offers = [
        pb.OfferSpec(offer_id=o.offer_id, group=o.group, offset=o.offset, block_tokens=o.block_tokens, groups=o.groups) for o in row.offers
    ]
    return pb.PrefillRow(
        sequence=row.sequence,
        rank=row.rank,
        offset=row.offset,
        tokens=row.tokens,
        start=row.start,
        pages=row.pages,
        samples=map(_sample_to_proto, row.samples),
        offers=offers,
    )


def _row_from_proto(message: pb.PrefillRow) -> PrefillRow:
    return PrefillRow(
        sequence=message.sequence,
        rank=message.rank,
        offset=message.offset,
        tokens=tuple(message.tokens),
        start=message.start,
        pages=tuple(message.pages),
        samples=tuple(map(_sample_from_proto, message.samples)),
        offers=tuple(OfferSpec(o.offer_id, o.group, o.offset, o.block_tokens, o.groups) for o in message.offers),
    )


def _decode_to_proto(command: DecodeSteps) -> pb.DecodeSteps:
    return pb.DecodeSteps(
        steps=command.steps,
        slots=[pb.RankSlots(slots=slots) for slots in command.slots],
        shaped=command.shaped,
        sampled=command.sampled,
        admits=map(_admit_to_proto, command.admits),
        grows=[pb.SlotGrow(rank=g.rank, slot=g.slot, limit=g.limit, pages=g.pages) for g in command.grows],
    )


def _decode_from_proto(step: int, message: pb.DecodeSteps) -> DecodeSteps:
    return DecodeSteps(
        step=step,
        steps=message.steps,
        slots=tuple(tuple(rank.slots) for rank in message.slots),
        shaped=message.shaped,
        sampled=message.sampled,
        admits=tuple(map(_admit_from_proto, message.admits)),
        grows=tuple(SlotGrow(g.rank, g.slot, g.limit, tuple(g.pages)) for g in message.grows),
    )


def _admit_to_proto(admit: SlotAdmit) -> pb.SlotAdmit:
    return pb.SlotAdmit(
        sequence=admit.sequence,
        rank=admit.rank,
        slot=admit.slot,
        token=admit.token,
        position=admit.position,
        limit=admit.limit,
        pages=admit.pages,
        sample=_sample_to_proto(admit.sample),
    )


def _admit_from_proto(message: pb.SlotAdmit) -> SlotAdmit:
    return SlotAdmit(
        sequence=message.sequence,
        rank=message.rank,
        slot=message.slot,
        token=message.token,
        position=message.position,
        limit=message.limit,
        pages=tuple(message.pages),
        sample=_sample_from_proto(message.sample),
    )


def _checksum_to_proto(checksum: BlockChecksum) -> pb.BlockChecksum:
    return pb.BlockChecksum(offer_id=checksum.offer_id, checksum=checksum.checksum)


def _checksum_from_proto(message: pb.BlockChecksum) -> BlockChecksum:
    return BlockChecksum(message.offer_id, message.checksum)


def _sampled_to_proto(sampled: SampledToken) -> pb.SampledToken:
    logprobs = logprobs_to_proto(sampled.logprobs) if sampled.logprobs is not None else None
    return pb.SampledToken(sequence=sampled.sequence, child=sampled.child, token=sampled.token, logprobs=logprobs)


def _sampled_from_proto(message: pb.SampledToken) -> SampledToken:
    logprobs = logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
    return SampledToken(message.sequence, message.child, message.token, logprobs)


def _row_logprobs_to_proto(row: Iterable[TokenLogprobs | None]) -> pb.RowLogprobs:
    return pb.RowLogprobs(steps=[pb.StepLogprobs(logprobs=logprobs_to_proto(p) if p is not None else None) for p in row])


def _row_logprobs_from_proto(message: pb.RowLogprobs) -> tuple[TokenLogprobs | None, ...]:
    return tuple(logprobs_from_proto(step.logprobs) if step.HasField("logprobs") else None for step in message.steps)
