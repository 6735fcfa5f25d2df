"""Rule 1 over layouts: every mode, layout pair, page size, chunk size and kind of model gives the
tokens of an oracle, and moves exactly the bytes that its KV spec states.

The oracle is a dense forward pass for the shipped models, and transformers' own tokens for the
golden families. Of the matrix a pairwise choice runs by default, in which every two settings meet;
`pytest -m slow` runs all."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jdisagg.config import EngineConfig, Mode
from jdisagg.errors import ConfigError, LayoutError
from launch.model import deployment
from tests.end_to_end.clusters import (
    PROMPT,
    TOKENS,
    check,
    check_bytes,
    check_continuations,
    dense_greedy,
    dense_logprobs,
    golden_copy,
    golden_greedy,
    moved_bytes,
    running,
)
from tests.end_to_end.pairwise import pairwise
from tests.golden.arrays import arrays_of
from tests.lanes import first_ci
from tests.shapes import CHUNK, FAMILY, LLAMA, MOE, config

PREFILLS = ("tp=1", "tp=2", "tp=4", "dp=2,tp=2", "dp=4")
DECODES = ("tp=1", "dp=2", "dp=4", "dp=2,tp=2")
PAGES = (8, 16)
CHUNKS = (16, 64)
TWO_MESHES = ((Mode.DISAGGREGATED,), PREFILLS, DECODES, PAGES, PAGES, CHUNKS)
ONE_MESH = (
    (Mode.CHUNKED, Mode.UNIFIED),
    ("tp=1",),  # unused
    tuple(sorted({*PREFILLS, *DECODES})),
    (16,),  # unused
    PAGES,
    CHUNKS,
)
ci, slow = pytest.mark.ci, pytest.mark.slow


def engine_of(
    mode: Mode, prefill: str, decode: str, prefill_page: int, decode_page: int, chunk: int
) -> EngineConfig:
    pages = {"prefill_page": prefill_page, "decode_page": decode_page}
    return config(mode, prefill, decode, chunk=chunk, **pages)


async def test_two_meshes_of_the_shared_shape_give_the_tokens_of_a_dense_pass() -> None:
    async with running(config()) as run:
        prompt = run.tokenizer.encode(PROMPT) * 3
        assert len(prompt) > CHUNK, "a chunk goes on from pages"
        greedy = dense_greedy(LLAMA, prompt, TOKENS)
        done = await check_bytes(run, prompt, greedy, logprobs=0)
    logprobs = [one.logprob for one in done.logprobs[0]]
    assert logprobs == pytest.approx(dense_logprobs(LLAMA, prompt, greedy), abs=1e-4)


@ci
async def test_kv_that_an_int8_codec_packs_gives_nearly_the_log_probabilities_of_a_dense_pass() -> (
    None
):
    engine = config(prefill="tp=4", decode="dp=2,tp=2")
    async with running(replace(engine, decode=replace(engine.decode, codec="int8"))) as run:
        prompt = run.tokenizer.encode(PROMPT) * 3
        request = run.request(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        done = await run.complete(request)
        moved = sum(run.cluster.channel.bytes_per_pair().values())
        assert 0 < moved < 0.4 * moved_bytes(run.cluster, len(prompt)), "packed"
    said = [one.logprob for one in done.logprobs[0]]
    exact = dense_logprobs(LLAMA, prompt, done.tokens[0])
    assert said[0] == pytest.approx(exact[0], abs=1e-4), "of the prefill mesh"
    assert 0 < np.max(np.abs(np.subtract(said, exact))) < 0.1


@ci
@pytest.mark.parametrize(("case",), first_ci(zip(pairwise(*TWO_MESHES)), ci=2), ids=str)
async def test_two_meshes_give_the_tokens_of_a_dense_pass(case):
    await check(engine_of(*case))


@ci
@pytest.mark.parametrize(("case",), first_ci(zip(pairwise(*ONE_MESH))), ids=str)
async def test_one_mesh_gives_the_tokens_of_a_dense_pass(case):
    await check(engine_of(*case))


@slow
@pytest.mark.parametrize(
    "case", [*itertools.product(*TWO_MESHES), *itertools.product(*ONE_MESH)], ids=str
)
async def test_all_combinations_give_the_tokens_of_a_dense_pass(case):
    await check(engine_of(*case))


@ci
@pytest.mark.parametrize(
    ("prefill", "decode"),
    first_ci(
        [
            ("dp=1,tp=4,ep=4", "dp=4,tp=1,ep=4"),
            ("dp=1,tp=4,ep=1", "dp=4,tp=1,ep=1"),
            ("dp=2,tp=2,ep=4", "dp=2,tp=2,ep=2"),
        ]
    ),
)
async def test_experts_spread_any_way_give_the_tokens_of_a_dense_pass(prefill, decode):
    await check(config(Mode.DISAGGREGATED, prefill, decode, directory=MOE))


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "chunk"),
    [
        pytest.param("glm4_moe_groups", "tp=2,ep=2", "dp=2,tp=2,ep=4", 64, marks=slow),
        pytest.param("minimax_m2", "dp=2", "tp=4,ep=4", 64, marks=slow),
        pytest.param("gpt_oss", "tp=2,ep=2", "dp=2,tp=2", 64, marks=ci),
        pytest.param("olmo3", "tp=2", "dp=2", 64, marks=slow),
        pytest.param("ministral3", "tp=1", "tp=4", 64, marks=slow),
        pytest.param("mistral4", "tp=4,ep=4", "dp=2,tp=2,ep=4", 64, marks=slow),
        pytest.param("phi3", "tp=4", "dp=2", 64, marks=slow),
        pytest.param("apertus", "tp=2", "dp=2,tp=2", 16, marks=slow),
        pytest.param("glm4v", "tp=1", "tp=2", 16, marks=slow),
        pytest.param("gemma2", "tp=2", "dp=2,tp=2", 64, marks=slow),
        pytest.param("gemma3", "tp=2", "dp=2,tp=2", 64, marks=slow),
        # More devices than KV heads by which all of its layers could be cut.
        pytest.param("gemma4", "tp=4", "dp=2,tp=2", 64, marks=slow),
        pytest.param("gemma4_moe", "tp=4", "dp=2,tp=2,ep=4", 64, marks=slow),
        # Layers that read the KV of an earlier layer, for the tokens that sample alone.
        pytest.param("gemma4_e2b", "tp=2", "dp=2", 16, marks=ci),
        pytest.param("gemma4_e2b", "tp=4", "dp=2,tp=2", 64, marks=slow),
        # Latent attention. With chunks of 16 the second one attends to latents in pages.
        pytest.param("deepseek_v3", "tp=1", "tp=4", 64, marks=ci),
        pytest.param("deepseek_v3", "tp=2,ep=2", "dp=2,tp=2,ep=4", 16, marks=slow),
        # An indexer that selects 16 of the positions.
        pytest.param("deepseek_v32", "tp=2", "dp=2", 16, marks=ci),
        pytest.param("glm_moe_dsa", "dp=2,tp=2", "tp=2,ep=2", 16, marks=slow),
        # One that several layers share, of which the last computes the tokens that sample alone.
        pytest.param("glm_moe_dsa_shared", "tp=2", "dp=2", 16, marks=ci),
        # An indexer that selects 3 blocks of 8 positions, for each KV head.
        pytest.param("minimax_m3", "tp=2", "dp=2", 16, marks=ci),
        pytest.param("minimax_m3", "tp=4,ep=4", "dp=2,tp=2,ep=4", 16, marks=slow),
        pytest.param("mimo_v2_flash", "tp=2,ep=2", "dp=2,tp=2", 16, marks=slow),
        pytest.param("step3p7", "tp=2,ep=2", "dp=2,tp=2", 16, marks=slow),
        pytest.param("cohere", "tp=4", "tp=2", 64, marks=slow),
        pytest.param("cohere2", "tp=2", "dp=2,tp=2", 16, marks=slow),
        pytest.param("llama4", "tp=2,ep=2", "dp=2,tp=2,ep=4", 16, marks=slow),
        pytest.param("llama4_dense", "tp=1", "tp=4", 16, marks=slow),
        # State beside KV. With chunks of 16 the second one starts from a state.
        pytest.param("qwen3_5", "tp=2", "dp=2,tp=1", 16, marks=ci),
        pytest.param("granite4_moe", "tp=2", "dp=2,tp=1", 16, marks=slow),
        pytest.param("lfm2", "tp=4", "dp=2", 16, marks=ci),
        # State and windows, whose KV is sent with that of the other layers.
        pytest.param("lfm3", "tp=2", "dp=2", 16, marks=ci),
        pytest.param("minimax", "tp=4", "dp=2", 16, marks=ci),
        pytest.param("minimax", "dp=2,tp=2,ep=4", "tp=2,ep=2", 64, marks=slow),
        pytest.param("granite4_hybrid", "tp=1", "tp=4", 16, marks=slow),
        pytest.param("nemotron_h_moe", "tp=1", "tp=2", 16, marks=slow),
        pytest.param("nemotron_h", "dp=2", "tp=4", 16, marks=slow),
        pytest.param("qwen3_next", "tp=4,ep=4", "dp=2,tp=2,ep=4", 16, marks=slow),
        # State and latents, which are cut for as many shards as the state has heads.
        pytest.param("kimi_linear", "tp=2", "dp=2", 16, marks=ci),
        pytest.param("kimi_linear", "tp=1", "tp=4", 64, marks=slow),
        pytest.param("kimi_linear_shared", "tp=2,ep=2", "dp=4,ep=4", 16, marks=slow),
        pytest.param("bailing_hybrid", "tp=2,ep=2", "dp=2,ep=2", 16, marks=ci),
    ],
)
async def test_a_family_gives_the_tokens_of_transformers(
    name: str, prefill: str, decode: str, chunk: int, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    sizes = config(
        prefill=prefill, decode=decode, directory=directory, context=128, slots=1, chunk=chunk
    )
    async with running(sizes) as run:
        done = await check_bytes(run, prompt, greedy, logprobs=1)
    logits = arrays_of(directory / "expected.npz")["logits"][len(prompt) - 1].astype(np.float64)
    first = logits[greedy[0]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert done.logprobs[0][0].logprob == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "mode", "layout"),
    [
        pytest.param("deepseek_v3", Mode.UNIFIED, "dp=2,tp=2", marks=slow),
        pytest.param("deepseek_v3", Mode.CHUNKED, "dp=2,tp=2", marks=ci),
        pytest.param("deepseek_v32", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("glm_moe_dsa_shared", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("minimax_m3", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("gemma4_e2b", Mode.CHUNKED, "dp=2,tp=2", marks=ci),
        pytest.param("llama4", Mode.UNIFIED, "tp=4", marks=slow),
        pytest.param("lfm2", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("lfm3", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("bailing_hybrid", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("qwen3_next", Mode.CHUNKED, "dp=1,tp=2", marks=slow),
        pytest.param("kimi_linear", Mode.CHUNKED, "dp=2,tp=2", marks=slow),
        pytest.param("minimax", Mode.CHUNKED, "dp=2,tp=2,ep=2", marks=slow),
        pytest.param("granite4_hybrid", Mode.UNIFIED, "tp=2", marks=slow),
        pytest.param("nemotron_h_moe", Mode.CHUNKED, "tp=2,ep=2", marks=slow),
        pytest.param("qwen3_5_moe", Mode.UNIFIED, "tp=4", marks=slow),
    ],
)
async def test_a_family_on_one_mesh_gives_the_tokens_of_transformers(
    name: str, mode: Mode, layout: str, tmp_path: Path
) -> None:
    """Three prompts of different lengths at once: chunks are packed, and a prompt goes on in a
    second one."""
    directory = golden_copy(name, tmp_path)
    sizes = config(mode, decode=layout, directory=directory, **FAMILY)
    async with running(sizes) as run:
        await check_continuations(run, directory, (24, 51, 40))


@pytest.mark.parametrize(
    ("name", "prefill", "slots", "pages"),
    [
        pytest.param("deepseek_v3", "tp=2", 8, 26, marks=slow),
        pytest.param("deepseek_v32", "tp=2", 8, 26, marks=slow),
        pytest.param("minimax_m3", "tp=2", 8, 26, marks=slow),
        pytest.param("lfm2", "dp=2", 6, 22, marks=slow),
        pytest.param("qwen3_5", "dp=2", 6, 22, marks=slow),
        pytest.param("kimi_linear", "tp=2", 6, 22, marks=ci),
        pytest.param("minimax", "dp=2", 6, 22, marks=slow),
        pytest.param("nemotron_h_moe", "dp=2", 6, 22, marks=slow),
    ],
)
async def test_preempted_ones_and_several_of_one_prompt_give_the_tokens_of_each_alone(
    name: str, prefill: str, slots: int, pages: int, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    sizes = config(
        prefill=prefill,
        decode="tp=2",
        directory=directory,
        context=128,
        slots=slots,
        chunk=32,
        decode_page=8,
        pages=pages,
        growth=1,
    )
    async with running(sizes) as run:
        await check_continuations(run, directory, (24, 31, 40, 25, 33, 52), (1, 2, 1, 1, 1, 1))


def test_devices_and_contexts_that_are_not_there_are_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match=r"prefill \(.*need 10 devices, and there are 8"):
        deployment(config(prefill="tp=8", decode="dp=2"))
    with pytest.raises(ConfigError, match=r"context_tokens=100000 exceeds the model's \d+; lower"):
        deployment(config(context=100_000))


def test_the_pairwise_choice_covers_every_pair():
    for choices in (TWO_MESHES, ONE_MESH):
        full, chosen = list(itertools.product(*choices)), pairwise(*choices)
        for i, j in itertools.combinations(range(len(choices)), 2):
            assert {(case[i], case[j]) for case in full} == {(case[i], case[j]) for case in chosen}
        assert len(chosen) < len(full) / 2
