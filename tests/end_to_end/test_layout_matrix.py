"""Rule 1 over layouts: every mode, layout pair, page size and chunk size gives the tokens of a
dense forward pass.

By default a pairwise choice runs: every two settings meet at least once. All: `pytest -m slow
tests/end_to_end/test_layout_matrix.py`."""

import itertools
from functools import cache

import pytest

from jdisagg.config import Mode
from tests.end_to_end.clusters import LLAMA, MOE, config, dense_greedy, running
from tests.lanes import first_quick

PROMPT = (
    "Once upon a time there was a little girl named Lily who lived in a small house near the"
    " forest. One day she"
)
TOKENS = 40

PREFILLS = ("tp=1", "tp=2", "tp=4", "dp=2,tp=2", "dp=4")
DECODES = ("tp=1", "dp=2", "dp=4", "dp=2,tp=2")
PAGES = (8, 16)
CHUNKS = (16, 64)


def pairwise(*choices: tuple) -> list[tuple]:
    """Cases in which every pair of values of two different parameters occurs, chosen greedily,
    always the same."""
    cases = list(itertools.product(*choices))
    pairs = {
        (i, a, j, b)
        for case in cases
        for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)
    }
    chosen: list[tuple] = []
    while pairs:
        best = max(
            cases,
            key=lambda case: sum(
                (i, a, j, b) in pairs
                for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)
            ),
        )
        chosen.append(best)
        pairs -= {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(best), 2)}
    return chosen


@cache
def expected(directory: object = LLAMA) -> list[int]:
    from models.tokenizer import Tokenizer

    return dense_greedy(directory, Tokenizer.from_directory(directory).encode(PROMPT), TOKENS)  # type: ignore[arg-type]


async def check(engine: object, directory: object = LLAMA) -> None:
    async with running(engine) as run:  # type: ignore[arg-type]
        request = run.request(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        done = await run.complete(request)
        assert done.tokens[0] == expected(directory)
        if run.cluster.prefill:
            assert done.last and done.last.timings
            moved, replicas = (
                done.last.timings.kv_bytes_moved,
                run.cluster.decode.loaded.mesh.shape["rep"],
            )
            padded = -(-len(request.prompt_token_ids) // 16) * 16
            assert moved == padded * run.cluster.kv_spec.bytes_per_token * replicas
            assert sum(run.cluster.channel.bytes_per_pair().values()) == moved


SPLIT = list(itertools.product(PREFILLS, DECODES, PAGES, PAGES, CHUNKS))
SPLIT_PAIRWISE = pairwise(PREFILLS, DECODES, PAGES, PAGES, CHUNKS)
ONE_MESH = list(
    itertools.product((Mode.CHUNKED, Mode.UNIFIED), sorted({*PREFILLS, *DECODES}), PAGES, CHUNKS)
)
ONE_MESH_PAIRWISE = pairwise(
    (Mode.CHUNKED, Mode.UNIFIED), tuple(sorted({*PREFILLS, *DECODES})), PAGES, CHUNKS
)


@pytest.mark.parametrize(
    ("prefill", "decode", "prefill_page", "decode_page", "chunk"), first_quick(SPLIT_PAIRWISE)
)
async def test_two_meshes_give_the_tokens_of_a_dense_pass(
    prefill, decode, prefill_page, decode_page, chunk
):
    await check(
        config(
            Mode.DISAGGREGATED,
            prefill,
            decode,
            prefill_page=prefill_page,
            decode_page=decode_page,
            chunk=chunk,
        )
    )


@pytest.mark.parametrize(("mode", "layout", "page", "chunk"), first_quick(ONE_MESH_PAIRWISE))
async def test_one_mesh_gives_the_tokens_of_a_dense_pass(mode, layout, page, chunk):
    await check(config(mode, decode=layout, decode_page=page, chunk=chunk))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "prefill_page", "decode_page", "chunk"), SPLIT)
async def test_two_meshes_give_the_tokens_of_a_dense_pass_in_all_combinations(
    prefill, decode, prefill_page, decode_page, chunk
):
    await check(
        config(
            Mode.DISAGGREGATED,
            prefill,
            decode,
            prefill_page=prefill_page,
            decode_page=decode_page,
            chunk=chunk,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "layout", "page", "chunk"), ONE_MESH)
async def test_one_mesh_gives_the_tokens_of_a_dense_pass_in_all_combinations(
    mode, layout, page, chunk
):
    await check(config(mode, decode=layout, decode_page=page, chunk=chunk))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("dp=1,tp=4,ep=4", "dp=4,tp=1,ep=4"),
        ("dp=1,tp=4,ep=1", "dp=4,tp=1,ep=1"),
        ("dp=2,tp=2,ep=4", "dp=2,tp=2,ep=2"),
    ],
)
async def test_experts_spread_any_way_give_the_tokens_of_a_dense_pass(prefill, decode):
    await check(config(Mode.DISAGGREGATED, prefill, decode, directory=MOE), MOE)


def test_the_pairwise_choice_covers_every_pair():
    for full, chosen in ((SPLIT, SPLIT_PAIRWISE), (ONE_MESH, ONE_MESH_PAIRWISE)):
        for i, j in itertools.combinations(range(len(full[0])), 2):
            assert {(case[i], case[j]) for case in full} == {(case[i], case[j]) for case in chosen}
        assert len(chosen) < len(full) / 2
