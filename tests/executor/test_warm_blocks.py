"""What warm-up prepares for blocks is all that moving them needs (rule 12), whoever the peer is and however its blocks travel."""

import pytest

from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.executor.warm_up import block_lengths
from jdisagg.scheduler.commands import ExtractBlock
from tests.executor.meshes import Pair

KEY = 99


@pytest.mark.parametrize(
    ("prefill", "decode", "codec"),
    [pytest.param("tp=4", "dp=2,tp=2", "none", marks=pytest.mark.slow), ("tp=1", "tp=4", "int8"), ("tp=2", "tp=1", "int4")],
)
async def test_nothing_is_built_for_blocks_after_warm_up(prefill, decode, codec):
    two = Pair(prefill, decode, codec=codec, connect=False)
    try:
        for form in chunk_forms(two.prefill.limits, 128):
            two.prefill.warm_prefill(128, form)
        for group in range(2):
            for tokens in block_lengths(two.decode.limits):
                two.decode.warm_insert(group, tokens)
                two.decode.warm_extract(group, tokens)
        before = two.prefill.programs.compilations, two.decode.programs.compilations
        two.connect()
        result = await two.compute([(0, 0, 37, 100), (0, 48, 64, 200)], KEY)
        for one in result.checksums:
            assert (await two.move(one.offer_id, 0, KEY)).intact
        await two.decode.run(ExtractBlock(5, 77, 0, 1, 0, 40, 64, tuple(range(3, 24))[::-1][:5], KEY))
        assert (two.prefill.programs.compilations, two.decode.programs.compilations) == before
    finally:
        two.close()
