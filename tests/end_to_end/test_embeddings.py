"""Embeddings of random checkpoints are those of transformers, by the rules of sentence-transformers
(tests/golden/make_embeddings.py), over layouts, packed and alone, with cached beginnings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.request import Request
from tests.end_to_end.clusters import GOLDEN, Running, golden_copy, running
from tests.fakes.cluster import Collected
from tests.lanes import first_quick
from tests.shapes import FAMILY, config

EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((GOLDEN / "embeddings.json").read_text())


def headless(name: str, folder: Path) -> Path:
    """As embedding models are saved: without the head, and without the prefix of names."""
    directory = golden_copy(name, folder)
    tensors = load_file(directory / "model.safetensors")
    body = {
        key.removeprefix("model."): value
        for key, value in tensors.items()
        if key.startswith("model.")
    }
    save_file(body, directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text())
    fields["architectures"] = [
        one.replace("ForCausalLM", "Model") for one in fields["architectures"]
    ]
    (directory / "config.json").write_text(json.dumps(fields))
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return directory


def form(pooling: str, normalized: bool = True) -> EmbeddingForm:
    return EmbeddingForm(pooling, normalized)


def request(run: Running, row: dict[str, Any], pooling: str, name: str) -> Request:
    built = run.request(row["ids"], name, max_tokens=1, ignore_eos=True)
    return dataclasses.replace(built, pooling=pooling, prefill_only=True)


def check(row: dict[str, Any], pooling: str, done: Collected) -> None:
    assert done.prompt_logprobs is not None
    vector = form(pooling).vector(done.prompt_logprobs, len(row["ids"]), None)
    np.testing.assert_allclose(vector, row[pooling], atol=1e-4)
    if pooling == "last":
        raw = form("last", False).vector(done.prompt_logprobs, len(row["ids"]), None)
        np.testing.assert_allclose(raw, row["last_raw"], atol=1e-4)
        cut = form("last").vector(done.prompt_logprobs, len(row["ids"]), 8)
        np.testing.assert_allclose(cut, row["last_cut"], atol=1e-4)


def engine(directory: Path, mode: Mode, prefill: str) -> EngineConfig:
    made = config(mode, prefill=prefill, directory=directory, **FAMILY)
    return dataclasses.replace(
        made, prefix=PrefixConfig(reuse=True, grain_tokens=16, append_tokens=0, host_gib=0)
    )


CASES = [
    ("qwen3", Mode.CHUNKED, "tp=1"),
    ("mistral_window", Mode.DISAGGREGATED, "tp=2"),
    ("llama_tied", Mode.DISAGGREGATED, "pp=2"),
    ("qwen3_moe", Mode.DISAGGREGATED, "dp=2,tp=2"),
    ("glm4", Mode.UNIFIED, "tp=1"),
]


@pytest.mark.parametrize(("name", "mode", "prefill"), first_quick(CASES, quick=0, ci=5))
async def test_embeddings_are_those_of_transformers(
    name: str, mode: Mode, prefill: str, tmp_path: Path
) -> None:
    directory = headless(name, tmp_path)
    async with running(engine(directory, mode, prefill)) as run:
        for pooling in ("last", "mean"):
            for turn in ("packed", "again"):
                asked = [
                    request(run, row, pooling, f"{pooling}{turn}{at}")
                    for at, row in enumerate(EXPECTED[name])
                ]
                done = await run.complete_all(asked)
                for row, one in zip(EXPECTED[name], done, strict=True):
                    check(row, pooling, one)
                    assert one.timings and one.timings.kv_bytes_moved == 0
                cached = sum(one.cached_tokens for one in done)
                assert (cached > 0) == (pooling == "last" and turn == "again")
        texts = [run.request(row["ids"], f"text{at}") for at, row in enumerate(EXPECTED[name])]
        mixed = [request(run, row, "mean", f"m{at}") for at, row in enumerate(EXPECTED[name])]
        scored = run.request(EXPECTED[name][3]["ids"], "scored", prompt_logprobs=1)
        *done, _ = await run.complete_all([*mixed, *texts, scored])
        for row, one in zip(EXPECTED[name], done[: len(mixed)], strict=True):
            check(row, "mean", one)
