"""A sequence whose logits are not finite ends with a typed error; its neighbours in the same batch
lose nothing."""

import asyncio
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.config import Mode
from jdisagg.errors import BrokenModelError
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, running
from tests.lanes import first_ci
from tests.shapes import LLAMA, config

pytestmark = pytest.mark.ci

POISON = 700


def untied(directory: Path) -> Path:
    """The shipped model with a head of its own, so that a poisoned embedding row is not everybody's
    logit."""
    shutil.copytree(LLAMA, directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
        directory / "model.safetensors",
    )
    return directory


def poison(run: Running) -> None:
    """Makes the embedding of one token NaN on every mesh: sequences that hold it have no finite
    logits from there on."""
    for instance in run.cluster.replicas:
        stem = instance.executor._stages[0].weights.stem
        table = stem.leaves[0]
        assert table.shape[0] >= run.cluster.model.vocabulary, (
            "the first array of the stem is the embedding"
        )
        poisoned = table.at[POISON].set(jnp.nan)
        object.__setattr__(stem, "leaves", (poisoned, *stem.leaves[1:]))


@pytest.mark.parametrize(("mode",), first_ci([(Mode.DISAGGREGATED,), (Mode.CHUNKED,)]))
async def test_a_sequence_without_finite_logits_ends_alone(mode, tmp_path):
    async with running(config(mode, directory=untied(tmp_path / "model"))) as run:
        spared = {"max_tokens": 60, "ignore_eos": True, "logit_bias": ((POISON, -100.0),)}
        good = [run.request(f"a dog and {name}", name, **spared) for name in ("x", "y")]
        alone = [await run.complete(request) for request in good]
        poison(run)
        bad_prompt = Request("prompt", (5, POISON, 6), good[0].sampling)
        # This one is made to choose the poisonous token itself, and breaks at the step after.
        bad_choice = run.request(
            "once", "choice", max_tokens=20, ignore_eos=True, logit_bias=((POISON, 100.0),)
        )
        streams = [run.complete(request) for request in (*good, bad_prompt, bad_choice)]
        first, second, third, fourth = await asyncio.gather(*streams, return_exceptions=True)
    assert isinstance(third, BrokenModelError) and isinstance(fourth, BrokenModelError)
    for result, expected in zip((first, second), alone, strict=True):
        assert not isinstance(result, BaseException) and result.tokens == expected.tokens
