"""Logits and greedy tokens against Hugging Face transformers, for a checkpoint of every family and
option (tests/golden/make.py)."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdisagg.layout.axes import Layout
from jdisagg.ops.dense_attention import dense_causal_attend
from models.catalog import FAMILIES
from models.checkpoint import load_model
from models.hf_config import HfConfig
from tests.golden.arrays import arrays_of

GOLDEN = Path(__file__).parent.parent / "golden"
FIXTURES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
# One of each mechanism. Images, adapters and stored forms have tests of their own.
MECHANISMS = (
    "llama_biased",
    "gemma2",  # windows and caps
    "gpt_oss_mxfp4",  # sinks, experts in mxfp4
    "deepseek_v3",  # latents, experts
    "deepseek_v32",  # an indexer of positions
    "minimax_m3",  # an indexer of blocks
    "qwen3_next",  # the delta rule
    "granite4_hybrid",  # Mamba-2
    "lfm2",  # short convolutions
    "minimax",  # lightning attention
)


# Options with code of their own.
OPTIONS = (
    "llama_yarn",
    "llama_llama3",
    "phi3_longrope",
    "glm4_moe_groups",
    "granite4_moe",
    "glm_moe_dsa_shared",
    "gemma4_e2b",
)


def _family(name: str) -> str:
    return str(HfConfig.from_directory(GOLDEN / name).fields["model_type"])


def _in_lanes() -> list[object]:
    """In lane ci, besides options, is one fixture of each function that reads a config."""
    cases, read = [], {FAMILIES[_family(name)].read_config for name in MECHANISMS}
    for name in FIXTURES:
        if name in MECHANISMS:
            cases.append(name)
            continue
        reads = FAMILIES[_family(name)].read_config
        lane = pytest.mark.slow if reads in read and name not in OPTIONS else pytest.mark.ci
        cases.append(pytest.param(name, marks=lane))
        read.add(reads)
    return cases


def test_every_family_has_a_fixture() -> None:
    assert set(map(_family, FIXTURES)) == set(FAMILIES)


@pytest.mark.parametrize("name", _in_lanes())
def test_logits_and_greedy_tokens_equal_transformers(name: str) -> None:
    expected = arrays_of(GOLDEN / name / "expected.npz")
    prompt, greedy = expected["prompt"], expected["greedy"]
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1]).model
    # each greedy token is checked given those before it
    tokens_T = jnp.asarray(np.concatenate((prompt, greedy[:-1])))
    logits_TV = np.asarray(_logits(nnx.graphdef(model), nnx.state(model), tokens_T))
    assert np.abs(logits_TV[: len(prompt)] - expected["logits"]).max() < 2e-4
    np.testing.assert_array_equal(logits_TV[len(prompt) - 1 :].argmax(axis=1), greedy)


@partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, state: nnx.State, tokens_T: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(tokens_T, jnp.arange(tokens_T.shape[0]), dense_causal_attend)
