"""A prefill's last layer is computed for the rows that sample alone, and their logits are those of
a dense pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.executor.prefill_program import ChunkForm
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_model
from tests.executor.prompts import prefiller
from tests.lanes import first_ci
from tests.shapes import CHUNK, GOLDEN, LLAMA


@pytest.mark.ci
def test_the_last_layer_computes_little_more_than_its_keys_and_values() -> None:
    executor = prefiller(LLAMA, "tp=1", groups=4)
    try:
        executor.warm_prefill(CHUNK, ChunkForm())
        programs: dict[object, Any] = {
            key[2:4]: program
            for key, program in executor.programs._built.items()
            if key[0] == "group"  # type: ignore[index]
        }
        whole, ending = (
            programs[ChunkForm(), last].cost_analysis()["flops"] for last in (False, True)
        )
        config = load_model(str(LLAMA), Layout(), jax.devices()[:1]).model.config
        head = config.attention.head_dim
        keys_values = 2 * config.width * 2 * config.attention.kv_heads * head
        of_a_row = 2 * config.width * (2 * config.attention.query_heads * head + 3 * config.ffn)
        assert whole > CHUNK * (keys_values + of_a_row)
        # besides the products, attention to a page
        least = CHUNK * keys_values + of_a_row
        assert least <= ending < 1.1 * CHUNK * keys_values + 2.5 * of_a_row
    finally:
        executor.close()


@pytest.mark.ci
def test_layers_that_read_kv_of_others_compute_the_tokens_that_sample_alone() -> None:
    executor = prefiller(GOLDEN / "gemma4_e2b", "tp=1", groups=1)
    try:
        flops = []
        for every in (True, False):
            executor.warm_prefill(CHUNK, ChunkForm(packed=True, every_token=every))
            (program,) = (
                built
                for key, built in executor.programs._built.items()
                if key[0] == "group" and key[2].every_token is every  # type: ignore[index]
            )
            flops.append(program.cost_analysis()["flops"])  # type: ignore[attr-defined]
        config = load_model(GOLDEN / "gemma4_e2b", Layout(), jax.devices()[:1]).model.config
        costs = config.cost_geometry("m")
        late = costs.late_part * (costs.parameters - costs.embedding_parameters)
        assert 0.3 < costs.late_part < 0.7
        assert flops[0] - flops[1] > 0.8 * 2 * CHUNK * late
    finally:
        executor.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name",),
    first_ci([("qwen2_windows",), ("mixtral",), ("llama_biased",), ("qwen3_moe_step",)], 2),
)
def test_a_layer_gives_the_rows_it_is_asked_for(name: str) -> None:
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1]).model
    asked = np.array([7, -1, 2, 7], np.int32)
    real, cached = asked >= 0, []

    def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, **how: Any) -> jax.Array:
        cached.append((k_TKH, v_TKH))
        if not q_TNH.shape[0]:
            return q_TNH
        none_TNH = jnp.zeros((k_TKH.shape[0], *q_TNH.shape[1:]), q_TNH.dtype)
        q_all_TNH = none_TNH.at[asked[real]].set(q_TNH[real])
        return dense_causal_attend(q_all_TNH, k_TKH, v_TKH, **how)[asked]

    x_TD = jax.random.normal(jax.random.key(0), (12, model.config.width))
    positions_T, valid_T = jnp.arange(12) + 3, jnp.ones(12, bool)
    for layer in model.layers:
        whole_TD = layer(x_TD, positions_T, dense_causal_attend, Shards(), valid_T)
        rows_RD = layer(x_TD, positions_T, attend, Shards(), valid_T, jnp.asarray(asked))
        np.testing.assert_allclose(rows_RD[real], whole_TD[asked[real]], atol=1e-5)
        none_RD = layer(x_TD, positions_T, attend, Shards(), valid_T, jnp.zeros(0, jnp.int32))
        assert none_RD.shape == (0, model.config.width)
    for (k, v), (k_again, v_again) in zip(cached[::2], cached[1::2], strict=True):
        assert k.shape[0] == v.shape[0] == 12
        np.testing.assert_array_equal(k, k_again)
        np.testing.assert_array_equal(v, v_again)
