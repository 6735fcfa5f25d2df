"""What warm-up prepares for blocks is all that moving them needs (rule 12), whoever the peer is and
however its blocks travel."""

import dataclasses

import pytest

from jdisagg.errors import ConfigError
from jdisagg.executor.mesh_executor import MeshRole
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
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.worker.block_moves import extraction, offers_of_pages
from tests.executor.meshes import INTO, PEER, HandChannel, Pair, executor
from tests.lanes import first_ci
from tests.shapes import CHUNK

KEY = 99


def mixed(codec: str) -> MeshRole:
    return MeshRole(True, True, codec=codec, extracts=True)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode", "codec", "few_tokens"),
    first_ci(
        [("tp=2", "dp=2", "none", 16), ("tp=1", "tp=4", "int8", 0), ("tp=2", "tp=1", "int4", 0)]
    ),
)
async def test_nothing_is_built_for_blocks_after_warm_up(prefill, decode, codec, few_tokens):
    two = Pair(prefill, decode, codec=codec, connect=False, few_tokens=few_tokens)
    try:
        for form in chunk_forms(two.prefill.limits):
            two.prefill.warm_prefill(CHUNK, form)
        shapes = two.decode.limits.block_shapes()
        for band, tokens in shapes:
            two.decode.warm_insert(band, tokens)
            two.decode.blocks.warm_extract(band, tokens)
        before = two.prefill.programs.compilations, two.decode.programs.compilations
        two.connect()
        result = await two.compute([(0, 0, 16, 100), (0, 16, 37, 200)], KEY, cut=split_blocks)
        for one in result.checksums:
            assert (await two.move(one.offer_id, 0, KEY)).intact
        for number, (band, tokens) in enumerate(shapes):
            block = (band.start, 0, tokens - 7, tokens, INTO[:8], KEY, len(band))
            await two.decode.run(ExtractBlock(5, 77 + number, 0, *block))
        assert (two.prefill.programs.compilations, two.decode.programs.compilations) == before
    finally:
        two.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("role", "layouts", "tokens"),
    [
        (mixed("int8"), ("tp=2", "tp=2"), (0, 73)),
        (
            MeshRole(True, False, emit=True, extracts=True, peer_tokens=48),
            ("tp=4", "tp=1"),
            (48, 96),
        ),
    ],
)
async def test_nothing_is_built_when_a_warm_worker_takes_another_ones_blocks(
    role: MeshRole, layouts: tuple[str, str], tokens: tuple[int, int]
):
    """Of a running sequence that moves between mixed workers, or of a prefill worker's prefix
    cache."""
    channel = HandChannel()
    sender, receiver = (
        executor(name, layout, role, channel, first)
        for name, layout, first in (("a", layouts[0], 0), ("b", layouts[1], 4))
    )
    try:
        for one in (sender, receiver):
            one.warm_prefill = one.warm_decode = lambda *_, **_more: None  # type: ignore[method-assign]  # not needed
            for step in warm_up_steps(one):
                step()
        before = sender.programs.compilations, receiver.programs.compilations
        await receiver.run(ConnectPeer(1, PEER, sender.card))
        offers = list(offers_of_pages(sender.limits, 0, *tokens, iter(range(70, 99)).__next__))
        for offer in offers:
            extract = extraction(2, offer, tuple(range(6)), 16, KEY)
            sent = await sender.run(extract)
            what = (offer.offer_id, 0, offer.group, offer.block_tokens)
            how = {"peer": PEER, "codec": role.codec, "groups": offer.groups}
            await receiver.run(PullBlock(3, *what, 10.0, **how))
            inserted = await receiver.run(
                InsertBlock(4, *what, offer.valid_tokens, offer.start, extract.pages, KEY, **how)
            )
            assert isinstance(sent, ExtractResult) and isinstance(inserted, InsertResult)
            assert inserted.intact
            assert role.codec != "none" or inserted.checksum == sent.checksum.checksum
        assert len(offers) > 1
        assert (sender.programs.compilations, receiver.programs.compilations) == before
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize("prefills", [False, True])
def test_a_worker_that_receives_refuses_a_codec_that_does_not_exist(prefills):
    role = dataclasses.replace(mixed("zip"), prefill=prefills)
    with pytest.raises(ConfigError, match="codec 'zip' is unknown"):
        executor("m", "tp=1", role)
