"""What warm-up prepares for blocks is all that moving them needs (rule 12), whoever the peer is and however its blocks travel."""

import pytest

from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.executor.warm_up import block_shapes
from jdisagg.scheduler.commands import ExtractBlock
from tests.executor.meshes import Pair

KEY = 99


@pytest.mark.parametrize(
    ("prefill", "decode", "codec", "few_tokens"),
    [
        pytest.param("tp=4", "dp=2,tp=2", "none", 0, marks=pytest.mark.slow),
        ("tp=1", "tp=4", "int8", 0),
        ("tp=2", "tp=1", "int4", 0),
        ("tp=2", "dp=2", "none", 32),
    ],
)
async def test_nothing_is_built_for_blocks_after_warm_up(prefill, decode, codec, few_tokens):
    two = Pair(prefill, decode, codec=codec, connect=False, few_tokens=few_tokens)
    try:
        for form in chunk_forms(two.prefill.limits, 128):
            two.prefill.warm_prefill(128, form)
        for band, tokens in block_shapes(two.decode.limits):
            two.decode.warm_insert(band, tokens)
            two.decode.warm_extract(band, tokens)
        before = two.prefill.programs.compilations, two.decode.programs.compilations
        two.connect()
        result = await two.compute([(0, 0, 37, 100), (0, 48, 64, 200)], KEY)
        for one in result.checksums:
            assert (await two.move(one.offer_id, 0, KEY)).intact
        pages = tuple(range(3, 24))[::-1][:5]
        await two.decode.run(ExtractBlock(5, 77, 0, 1, 0, 40, 64, pages, KEY))
        (band,) = {two.decode.limits.bands(16)[-1]}
        await two.decode.run(ExtractBlock(6, 78, 0, band.start, 0, 9, 16, pages[:2], KEY, len(band)))
        assert (two.prefill.programs.compilations, two.decode.programs.compilations) == before
    finally:
        two.close()
