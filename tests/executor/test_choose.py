"""What a mesh chooses from logits of which each device keeps a part is what it chooses from all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jdisagg.executor.choose import Variant, choose, logits
from jdisagg.executor.slot_state import RowFormat
from jdisagg.layout.axes import TP_AXES, Layout
from jdisagg.messages.step_commands import STUCK_TOKEN, SampleSpec
from jdisagg.model_api import Shards
from jdisagg.ops.parameters import layout_mesh, param_specs
from jdisagg.ops.sampling import WHOLE
from jdisagg.request import SamplingParams
from models.catalog import read_config
from models.decoder import init_model
from models.hf_config import HfConfig

ROWS, VOCABULARY, WIDTH = 12, 1001, 32
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("variant", [Variant.GREEDY, Variant.SAMPLED])
def test_a_vocabulary_that_stays_on_its_devices_gives_the_tokens_of_a_gathered_one(
    variant: Variant,
) -> None:
    layout = Layout(tp=4)
    stem = init_model(read_config(HfConfig(CONFIG)), jax.random.key(0), tp=layout.tp).stem
    graphdef, state = nnx.split(stem)
    leaves, treedef = jax.tree.flatten(state)
    rows = RowFormat(1, VOCABULARY)
    ints = np.zeros((ROWS, rows.ints), np.int32)
    floats = np.zeros((ROWS, rows.floats), np.float32)
    for row in range(ROWS):
        filters = {"top_k": 5 * (row % 3), "top_p": 1 - 0.2 * (row % 2)}
        rows.pack(
            ints[row],
            floats[row],
            SampleSpec(0, SamplingParams(temperature=0.9, seed=70 + row, **filters)),
        )
    x_BD = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)

    def tokens(platform: str) -> np.ndarray:
        shards = Shards(tp=TP_AXES, platform=platform)

        def body(leaves: tuple[jax.Array, ...], x_BD: jax.Array) -> jax.Array:
            merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            y_BD = merged.normed(x_BD)
            logits_BV, shard = logits(variant, merged, y_BD, shards, VOCABULARY)
            kept = VOCABULARY if platform == "cpu" else -(-VOCABULARY // layout.tp)
            assert logits_BV.shape[1] == kept
            position_B, active_B = jnp.full(ROWS, 9, jnp.int32), jnp.ones(ROWS, jnp.bool_)
            return choose(
                variant,
                rows,
                logits_BV,
                jnp.asarray(ints),
                jnp.asarray(floats),
                position_B,
                active_B,
                None,
                shard,
                platform,
            ).token

        mesh = layout_mesh(layout, 2, jax.devices()[:4])
        specs = (param_specs(stem, layout), PartitionSpec())
        run = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
        )
        return np.asarray(jax.jit(run)(tuple(leaves), x_BD))

    gathered = tokens("cpu")
    assert len(set(gathered.tolist())) > ROWS // 2
    assert tokens("gpu").tolist() == gathered.tolist()


def test_a_mask_leaves_its_row_what_it_allows_and_other_rows_what_they_had() -> None:
    rows, words = RowFormat(1, VOCABULARY), -(-VOCABULARY // 32)
    ints = np.zeros((ROWS, rows.ints), np.int32)
    floats = np.zeros((ROWS, rows.floats), np.float32)
    for row in range(ROWS):
        params = SamplingParams(temperature=0.9 * (row % 3 > 0), seed=70 + row, top_k=row)
        rows.pack(ints[row], floats[row], SampleSpec(0, params))
    logits_BV = np.random.default_rng(1).standard_normal((ROWS, VOCABULARY)).astype(np.float32)
    mask = np.full((ROWS, words), 0xFFFFFFFF, np.uint32)
    mask[0::4] = 0
    mask[0::4, 7] = 0b1000  # id 7 * 32 + 3 alone
    mask[1::4] = 0  # nothing

    def tokens(variant: Variant, mask_BW: jax.Array | None) -> list[int]:
        def body(logits_BV: jax.Array, mask_BW: jax.Array | None) -> jax.Array:
            position_B, active_B = jnp.full(ROWS, 9, jnp.int32), jnp.ones(ROWS, jnp.bool_)
            return choose(
                variant,
                rows,
                logits_BV,
                jnp.asarray(ints),
                jnp.asarray(floats),
                position_B,
                active_B,
                None,
                WHOLE,
                "cpu",
                mask_BW,
            ).token

        return np.asarray(jax.jit(body)(logits_BV, mask_BW)).tolist()

    free = tokens(Variant.SAMPLED, None)
    masked = tokens(Variant.MASKED, jnp.asarray(mask))
    assert masked[0::4] == [7 * 32 + 3] * 3
    assert masked[1::4] == [STUCK_TOKEN] * 3
    assert (masked[2::4], masked[3::4]) == (free[2::4], free[3::4])
