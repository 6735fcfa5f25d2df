"""Layouts, page sizes, dtypes and codecs over two real processes and the real transfer engine.
`test_layouts.py` holds the same in process.

Each case holds two things. The KV in the receiver's pages, when the sequence joins the batch, is
the KV in the sender's pages, bit for bit (with int8 within the codec's bound). The greedy tokens
are those of the same layouts and codec in one process: identical in float32, and in bfloat16 where
the batches are the same. Where batches differ (prompts at once), rule 1 holds: streams part only
where the choice was close. `pytest -m slow` runs all cases instead of the pairwise choice."""

from collections.abc import Iterator
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.kv_pages import kept_dtype
from tests.end_to_end.close_choices import check_parted
from tests.end_to_end.clusters import dense_greedy
from tests.end_to_end.process_matrix.cases import ALL, CHUNK_TOKENS, NEW_TOKENS, PAIRWISE, Case
from tests.end_to_end.process_matrix.processes import PROMPT_IDS, Matrix, in_process, two_processes
from tests.lanes import first_quick
from tests.shapes import LLAMA

# What rounding the result to its dtype adds, relative to the largest value in a row: half a step,
# and float32's own roundings.
ROUNDING = {"float32": 2.0**-21, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with two_processes() as matrix:
        yield matrix


@cache
def dense(prompt: tuple[int, ...]) -> list[int]:
    return dense_greedy(LLAMA, prompt, NEW_TOKENS)


def check_kv(case: Case, sent: np.ndarray, received: np.ndarray) -> None:
    assert sent.shape == received.shape
    assert sent.dtype == received.dtype == kept_dtype(case.dtype, "cpu")
    if case.codec == "none":
        assert sent.tobytes() == received.tobytes()
        return
    before, after = (
        kept.view(jnp.dtype(case.dtype)).astype(np.float32) for kept in (sent, received)
    )
    largest = np.max(np.abs(before), axis=-1, keepdims=True)
    assert np.all(np.abs(after - before) <= largest * (1 / 254 + ROUNDING[case.dtype]))
    assert np.any(after != before), "nothing was packed"


def check_streams(case: Case, streams: list[list[int]], expected: list[list[int]]) -> None:
    """Rule 1, where batches may differ."""
    if case.dtype == "float32":
        assert streams == expected
        return
    reference, found = (list(zip(PROMPT_IDS, one, strict=True)) for one in (expected, streams))
    check_parted(LLAMA, reference, found)


async def check(matrix: Matrix, case: Case) -> None:
    run = await matrix.run(case)
    assert run.received.channels
    assert all(said.endswith(" transfer engine") for said in run.received.channels)
    reference, kv = await in_process(case)
    sent, received = run.sent.seen, run.received.seen
    chunks = [-(-len(prompt) // CHUNK_TOKENS) for prompt in PROMPT_IDS]
    assert max(chunks) > 1 and min(chunks) == 1
    by_themselves = (
        sum(len(prompt) // CHUNK_TOKENS for prompt in PROMPT_IDS) if case.dtype == "float32" else 0
    )
    assert sent.chunks == sum(chunks) and received.inserts >= sum(chunks) + by_themselves > sum(
        chunks
    ) * (case.dtype == "float32")
    assert run.received.bytes_moved > 0
    assert (
        not {"checksums_mismatched", "pulls_failed", "blocks_pulled_again"}
        & run.received.counters.keys()
    )
    assert (
        sent.kv.keys() == received.kv.keys() == kv.keys() == {len(prompt) for prompt in PROMPT_IDS}
    )
    for tokens in sent.kv:
        assert np.all(np.any(sent.kv[tokens] != 0, axis=-1)), (
            "a row of the sender's KV was never written"
        )
        check_kv(case, sent.kv[tokens], received.kv[tokens])
        assert kv[tokens].tobytes() == received.kv[tokens].tobytes(), (
            "the same programs in one process left other KV"
        )
    assert run.streams.alone == reference.alone
    check_streams(case, run.streams.together, reference.together)
    check_streams(case, run.streams.together, reference.alone)
    if case.dtype == "float32" and case.codec == "none":
        assert reference.alone == [dense(prompt) for prompt in PROMPT_IDS]


# Each layout and both page sizes, dtypes and codecs once; every pair of them is in the slow lane.
@pytest.mark.parametrize(("case",), first_quick(zip(PAIRWISE), ci=2), ids=str)
async def test_two_processes_move_kv_and_give_the_tokens_of_one(matrix: Matrix, case: Case):
    await check(matrix, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
async def test_two_processes_move_kv_and_give_the_tokens_of_one_in_all_combinations(
    matrix: Matrix, case: Case
):
    await check(matrix, case)


def test_the_pairwise_choice_is_small_enough_for_every_run():
    assert len(PAIRWISE) <= 12
