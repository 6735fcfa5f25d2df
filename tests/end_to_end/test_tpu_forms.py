"""The forms of the ops and the order of array axes that a TPU gets, on a CPU: the tokens are those
of the oracle.

XLA's own order of axes on a CPU is row-major. The tests ask for the reverse, so that a weight or a
page array that some path creates in XLA's order is rejected by the first program that takes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode
from jdisagg.layout import platforms
from jdisagg.ops import device_layout
from tests.end_to_end.clusters import (
    PROMPT,
    check_bytes,
    expected,
    golden_copy,
    golden_greedy,
    running,
)
from tests.lanes import first_ci
from tests.shapes import LLAMA, MOE, config


@pytest.fixture(autouse=True)
def forms_of_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = replace(platforms.traits_of("tpu"), stores_bits=True)
    monkeypatch.setitem(platforms._TRAITS, "cpu", traits)
    monkeypatch.setattr(device_layout, "axis_order", lambda axes: tuple(reversed(range(axes))))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("directory", "prefill", "decode"),
    [
        (LLAMA, "tp=2", "dp=2"),
        pytest.param(MOE, "tp=2,ep=2", "dp=2,tp=1,ep=2", marks=pytest.mark.slow),
    ],
    ids=["llama", "experts"],
)
async def test_a_tpus_forms_give_the_tokens_of_a_dense_pass(
    directory: Path, prefill: str, decode: str
) -> None:
    engine = config(
        Mode.DISAGGREGATED, prefill, decode, directory=directory, prefill_page=32, decode_page=32
    )
    async with running(engine) as run:
        (weight, *_), *_ = run.cluster.decode.executor._pool.layers
        assert weight.format.layout.major_to_minor == (3, 2, 1, 0)
        await check_bytes(run, run.tokenizer.encode(PROMPT), expected(directory))


@pytest.mark.ci
@pytest.mark.parametrize(("name",), first_ci([("gpt_oss",), ("mistral4",)]))
async def test_latents_and_sinks_in_a_tpus_forms_give_the_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    engine = config(
        Mode.DISAGGREGATED,
        "tp=2",
        "dp=2",
        directory=directory,
        prefill_page=32,
        decode_page=32,
        context=256,
    )
    async with running(engine) as run:
        await check_bytes(run, prompt, greedy)
