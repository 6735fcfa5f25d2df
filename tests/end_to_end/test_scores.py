"""The scores of a real model: yes against no as in a dense forward pass, whatever mesh computes the
prompt, alone or packed, with a cached beginning or without. Nothing is handed over."""

import dataclasses

import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, dense_logprobs, running
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.shapes import LLAMA, config

pytestmark = pytest.mark.ci
YES, NO = 400, 900
QUERY = list(range(300, 340))


def prompts() -> list[list[int]]:
    return [QUERY + list(range(500 + at, 503 + 9 * at)) for at in range(8)]


def requests(run: Running, again: str = "") -> list[Request]:
    bias = {"logprobs": 2, "logit_bias": ((YES, 100.0), (NO, 100.0)), "max_tokens": 1}
    return [
        dataclasses.replace(run.request(ids, f"s{at}{again}", **bias), prefill_only=True)
        for at, ids in enumerate(prompts())
    ]


def difference(done: Collected) -> float:
    values = dict(done.logprobs[0][0].top)
    return values[YES] - values[NO]


@pytest.mark.parametrize(
    ("engine",),
    first_ci([(config(),), (config(Mode.CHUNKED),), (config(prefill="pp=2"),)]),
    ids=("two meshes", "one mesh", "stages"),
)
async def test_scores_are_those_of_a_dense_forward_pass(engine: EngineConfig) -> None:
    engine = dataclasses.replace(
        engine, prefix=PrefixConfig(reuse=True, grain_tokens=16, append_tokens=0, host_gib=0)
    )
    async with running(engine) as run:
        first = await run.complete_all(requests(run))
        again = await run.complete_all(requests(run, "again"))
    for ids, one, other in zip(prompts(), first, again, strict=True):
        ((yes,), (no,)) = (dense_logprobs(LLAMA, ids, [token]) for token in (YES, NO))
        assert difference(one) == pytest.approx(yes - no, abs=1e-4)
        assert difference(other) == pytest.approx(yes - no, abs=1e-4)
        assert one.timings and one.timings.kv_bytes_moved == 0
    assert all(one.cached_tokens for one in again)
