"""Models that keep state beside KV (hybrids of Gated DeltaNet, or of Mamba-2) under every mode and
over layouts: the tokens of transformers, whatever is handed over, preempted or shared, and every
slot of state free at the end."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode, PrefixConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from models.checkpoint import load_config
from tests.end_to_end.clusters import config, golden_copy, golden_greedy, running

BLOCK_TOKENS = 32  # that the prompt of 24 is handed over as


@pytest.mark.parametrize(
    ("name", "mode", "layout"),
    [
        pytest.param("qwen3_next", Mode.CHUNKED, "dp=1,tp=2", marks=pytest.mark.ci),
        pytest.param("granite4_moe", Mode.CHUNKED, "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("granite4_hybrid", Mode.UNIFIED, "tp=2", marks=pytest.mark.slow),
        pytest.param("nemotron_h", Mode.UNIFIED, "dp=2", marks=pytest.mark.slow),
        pytest.param("nemotron_h_moe", Mode.CHUNKED, "tp=2,ep=2", marks=pytest.mark.slow),
        pytest.param("qwen3_5", Mode.UNIFIED, "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", Mode.UNIFIED, "tp=4", marks=pytest.mark.slow),
    ],
)
async def test_one_mesh_gives_the_tokens_of_transformers(
    name: str, mode: Mode, layout: str, tmp_path: Path
) -> None:
    """Three of different lengths: chunks are packed, and a prompt goes on in a second one."""
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(mode, decode=layout, directory=directory, context=128, slots=2, chunk=32)
    starts = (24, 51, 40)
    async with running(sizes) as run:
        requests = [
            run.request(whole[:start], f"r{start}", max_tokens=88 - start, ignore_eos=True)
            for start in starts
        ]
        done = await run.complete_all(requests)
    assert [one.tokens[0] for one in done] == [whole[start:] for start in starts]


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("qwen3_5", "tp=2", "dp=2,tp=1"),
        pytest.param("granite4_moe", "tp=2", "dp=2,tp=1", marks=pytest.mark.ci),
        pytest.param("granite4_hybrid", "tp=1", "tp=4", marks=pytest.mark.slow),
        pytest.param("nemotron_h_moe", "tp=1", "tp=2", marks=pytest.mark.ci),
        pytest.param("nemotron_h", "dp=2", "tp=4", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "tp=1", "tp=4", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "tp=4,ep=4", "dp=2,tp=2,ep=4", marks=pytest.mark.slow),
    ],
)
async def test_state_handed_over_gives_the_tokens_of_transformers(
    name: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    """With chunks of 16 the prompt's second one goes on from a state; and the bytes on the way are
    the spec's."""
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    sizes = config(
        prefill=prefill, decode=decode, directory=directory, context=128, slots=1, chunk=16
    )
    async with running(sizes) as run:
        done = await run.complete(run.request(prompt, max_tokens=64, ignore_eos=True))
        assert done.tokens[0] == greedy
        moved = sum(run.cluster.channel.bytes_per_pair().values())
    layers = load_config(directory)
    spec = layers.kv_spec("float32")
    _, _, replicas = Layout.parse(decode).mesh_shape(layers.attention.kv_heads)
    each = BLOCK_TOKENS * spec.bytes_per_token + spec.state.bytes_per_token
    assert moved == replicas * each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_5", marks=pytest.mark.ci),
        pytest.param("granite4_moe", marks=pytest.mark.slow),
        pytest.param("nemotron_h_moe", marks=pytest.mark.slow),
    ],
)
async def test_preempted_ones_and_several_of_one_prompt_give_the_tokens_of_each_alone(
    name: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill="dp=2",
        decode="tp=2",
        directory=directory,
        context=128,
        slots=6,
        chunk=32,
        decode_page=8,
        pages=22,
        growth=1,
    )
    starts, counts = (24, 31, 40, 25, 33, 52), (1, 2, 1, 1, 1, 1)
    async with running(sizes) as run:
        requests = [
            run.request(whole[:start], f"r{start}", max_tokens=88 - start, ignore_eos=True, n=count)
            for start, count in zip(starts, counts, strict=True)
        ]
        done, _ = await run.complete_preempted(requests)
    for one, start, count in zip(done, starts, counts, strict=True):
        assert one.tokens == {child: whole[start:] for child in range(count)}


async def test_kv_that_stays_is_refused_for_a_model_with_state(tmp_path: Path) -> None:
    sizes = config(directory=golden_copy("qwen3_5", tmp_path), context=128, slots=1, chunk=16)
    with pytest.raises(ConfigError, match="prefix_cache is not for a model that keeps state"):
        async with running(replace(sizes, prefix=PrefixConfig(True, 16))):
            raise AssertionError("unreachable")
