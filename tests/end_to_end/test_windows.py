"""Models with a window in some layers: KV of these layers is transferred apart, as far as the
window reaches, into a sliding-window ring buffer on the decode side. The tokens are those of
transformers, however many windows long the sequence. Pages, ring buffers and transferred bytes are
those of the KV spec."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.layout.axes import Layout
from models.checkpoint import load_config
from tests.end_to_end.clusters import (
    PATIENT,
    check_bytes,
    config,
    dense_greedy,
    golden_copy,
    golden_greedy,
    running,
)

WINDOW = 9  # of all of these models
PAGE = 4


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("gpt_oss", "tp=1", "tp=2"),
        pytest.param("gemma2", "tp=2", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gemma3", "dp=2", "tp=4", marks=pytest.mark.ci),
        pytest.param("gemma4", "tp=2", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gemma4_moe", "tp=1", "tp=2", marks=pytest.mark.slow),
    ],
)
async def test_a_sequence_many_windows_long_holds_no_more_than_one(
    name: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill=prefill,
        decode=decode,
        directory=directory,
        context=128,
        slots=1,
        chunk=32,
        decode_page=PAGE,
    )
    spec, layout = load_config(directory).kv_spec("float32"), Layout.parse(decode)
    short = prompt[:5]
    async with running(sizes) as run:
        for tokens, expected in (
            (short, dense_greedy(directory, short, 30)),
            (whole[:24], whole[24:]),
            (whole[:50], whole[50:]),
        ):
            await check_bytes(run, tokens, expected)
        executor = run.cluster.decode.executor
    limits = executor.limits
    assert limits.ring_pages * PAGE == WINDOW - 1 + PAGE
    # Pages, and room for padding rows of a batch of one and of forced tokens beside it.
    padding = -(-(1 + limits.extra_rows(1)) // PAGE)
    held = (limits.pages_per_rank + padding) * spec.unwindowed.bytes_per_token
    ring_pages = limits.state_slots_per_rank * limits.ring_pages + padding
    rings = ring_pages * spec.windowed.bytes_per_token
    assert executor.pool_bytes == layout.dp * PAGE * (held + rings)


@pytest.mark.slow
async def test_nothing_is_compiled_for_windows_once_it_is_warm(tmp_path: Path) -> None:
    directory = golden_copy("gpt_oss", tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill="tp=1",
        decode="tp=1",
        directory=directory,
        context=128,
        slots=1,
        chunk=16,
        warm_up=True,
    )
    async with running(replace(sizes, limits=PATIENT)) as run:
        compiled = run.cluster.compilations
        for start in (24, 40):
            request = run.request(whole[:start], f"r{start}", max_tokens=8, ignore_eos=True)
            done = await run.complete(request)
            assert done.tokens[0] == whole[start : start + 8]
        assert run.cluster.compilations == compiled
