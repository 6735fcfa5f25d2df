"""What warm-up prepares for blocks is all that moving them needs (rule 12), whoever the peer is and
however its blocks travel."""

import pytest

from jdisagg.engine.replica import mesh_role
from jdisagg.errors import ConfigError
from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.executor.warm_up import warm_up_steps
from jdisagg.messages.step_commands import (
    ConnectPeer,
    ExtractBlock,
    ExtractResult,
    InsertBlock,
    InsertResult,
    PullBlock,
)
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.worker.outgoing_kv import extraction, offers_of_pages
from tests.executor.meshes import PEER, HandChannel, Pair, executor

KEY = 99


@pytest.mark.parametrize(
    ("prefill", "decode", "codec", "few_tokens"),
    [
        pytest.param("tp=4", "dp=2,tp=2", "none", 0, marks=pytest.mark.slow),
        pytest.param("tp=1", "tp=4", "int8", 0, marks=pytest.mark.ci),
        pytest.param("tp=2", "tp=1", "int4", 0, marks=pytest.mark.ci),
        pytest.param("tp=2", "dp=2", "none", 32, marks=pytest.mark.ci),
    ],
)
async def test_nothing_is_built_for_blocks_after_warm_up(prefill, decode, codec, few_tokens):
    two = Pair(prefill, decode, codec=codec, connect=False, few_tokens=few_tokens)
    try:
        for form in chunk_forms(two.prefill.limits, 128):
            two.prefill.warm_prefill(128, form)
        for band, tokens in two.decode.limits.block_shapes():
            two.decode.warm_insert(band, tokens)
            two.decode.blocks.warm_extract(band, tokens)
        before = two.prefill.programs.compilations, two.decode.programs.compilations
        two.connect()
        result = await two.compute([(0, 0, 37, 100), (0, 48, 64, 200)], KEY)
        for one in result.checksums:
            assert (await two.move(one.offer_id, 0, KEY)).intact
        pages = tuple(range(3, 24))[::-1][:5]
        await two.decode.run(ExtractBlock(5, 77, 0, 1, 0, 40, 64, pages, KEY))
        (band,) = {two.decode.limits.bands(16)[-1]}
        await two.decode.run(
            ExtractBlock(6, 78, 0, band.start, 0, 9, 16, pages[:2], KEY, len(band))
        )
        assert (two.prefill.programs.compilations, two.decode.programs.compilations) == before
    finally:
        two.close()


@pytest.mark.ci
@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_nothing_is_built_when_a_sequence_moves_between_mixed_workers_that_are_warm(codec):
    channel, role = HandChannel(), mesh_role(WorkerRole.MIXED, codec)
    sender, receiver = (
        executor(name, "tp=2", role, channel, first, page=16, dtype="float32")
        for name, first in (("m-0", 0), ("m-1", 4))
    )
    try:
        for one in (sender, receiver):
            one.warm_prefill = one.warm_decode = lambda *_: None  # type: ignore[method-assign]  # no part of a move
            for step in warm_up_steps(one):
                step()
        before = sender.programs.compilations, receiver.programs.compilations
        await receiver.run(ConnectPeer(1, PEER, sender.card))
        for offer_id, (group, start, tokens, block_tokens) in enumerate(
            [(0, 0, 64, 64), (1, 64, 9, 16)], 70
        ):
            pages = tuple(range(-(-(start + tokens) // 16)))
            await sender.run(
                ExtractBlock(2, offer_id, 0, group, start, tokens, block_tokens, pages, KEY)
            )
            await receiver.run(PullBlock(3, offer_id, 0, group, block_tokens, 10.0, PEER, codec))
            inserted = await receiver.run(
                InsertBlock(
                    4, offer_id, 0, group, block_tokens, tokens, start, pages, KEY, PEER, codec
                )
            )
            assert isinstance(inserted, InsertResult) and inserted.intact
        assert (sender.programs.compilations, receiver.programs.compilations) == before
    finally:
        sender.close()
        receiver.close()


@pytest.mark.ci
@pytest.mark.parametrize(("holder", "asker"), [("tp=2", "tp=2"), ("tp=4", "tp=1")])
async def test_nothing_is_built_when_a_prefill_worker_fetches_what_another_one_keeps(holder, asker):
    channel, role = HandChannel(), mesh_role(WorkerRole.PREFILL, "none", True, peer_tokens=48)
    sender, receiver = (
        executor(name, layout, role, channel, first, page=16, dtype="float32")
        for name, layout, first in (("p-0", holder, 0), ("p-1", asker, 4))
    )
    try:
        for one in (sender, receiver):
            one.warm_prefill = lambda *_: None  # type: ignore[method-assign]  # no part of it
            for step in warm_up_steps(one):
                step()
        before = sender.programs.compilations, receiver.programs.compilations
        await receiver.run(ConnectPeer(1, PEER, sender.card))
        offers = list(offers_of_pages(sender.limits, 0, 48, 96, iter(range(70, 99)).__next__))
        for offer in offers:
            extract = extraction(2, offer, tuple(range(6)), 16, KEY)
            sent = await sender.run(extract)
            await receiver.run(
                PullBlock(
                    3, offer.offer_id, 0, offer.group, offer.block_tokens, 10.0, PEER,
                    groups=offer.groups,
                )
            )  # fmt: skip
            inserted = await receiver.run(
                InsertBlock(
                    4, offer.offer_id, 0, offer.group, offer.block_tokens, offer.valid_tokens,
                    offer.start, extract.pages, KEY, PEER, groups=offer.groups,
                )
            )  # fmt: skip
            assert isinstance(sent, ExtractResult) and isinstance(inserted, InsertResult)
            assert inserted.checksum == sent.checksum.checksum
        assert len(offers) > 1
        assert (sender.programs.compilations, receiver.programs.compilations) == before
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize("role", [WorkerRole.DECODE, WorkerRole.MIXED])
def test_a_worker_that_receives_refuses_a_codec_that_does_not_exist(role):
    with pytest.raises(ConfigError, match="codec 'zip' is unknown"):
        executor("m", "tp=1", mesh_role(role, "zip"), HandChannel(), 0, page=16, dtype="float32")
