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
MECHANISMS = (
    *("llama_biased", "gemma2", "gpt_oss_mxfp4", "qwen3_moe", "llama4", "mimo_v2_flash"),
    *("deepseek_v3", "deepseek_v32", "minimax_m3", "qwen3_next", "granite4_hybrid", "lfm2"),
    *("minimax", "kimi_linear", "gemma4", "qwen3_vl", "apertus", "llama_yarn"),
)


def test_every_family_has_a_fixture() -> None:
    kinds = {HfConfig.from_directory(GOLDEN / name).fields["model_type"] for name in FIXTURES}
    assert kinds == set(FAMILIES)


@pytest.mark.parametrize(
    "name",
    [name if name in MECHANISMS else pytest.param(name, marks=pytest.mark.ci) for name in FIXTURES],
)
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
