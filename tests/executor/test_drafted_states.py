"""The rows of a step with drafts give the outputs of as many steps, and leave the state after the
accepted rows, whatever the rejected ones hold."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.executor.draft_rows import DraftRows
from jdisagg.executor.drafted_states import DraftedStates
from jdisagg.executor.page_pool import LayerPages
from jdisagg.executor.slot_state import BatchRows
from jdisagg.executor.state_access import recur_over
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from models.checkpoint import load_model
from tests.lanes import first_quick
from tests.shapes import GOLDEN

LONGEST, SLOTS = 4, 3
ROWS = ((0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (1, 3))  # (slot, offset) of each row
COUNTS = (3, 4)
NOBODY = SLOTS + 5


def rows_of_step() -> DraftRows:
    """The rows of slot 1 are inactive from its third on."""
    slot_T, offset_T = (np.array(column, np.int32) for column in zip(*ROWS, strict=True))
    index_BQ = np.full((2, LONGEST), len(ROWS), np.int32)
    index_BQ[slot_T, offset_T] = np.arange(len(ROWS))
    zeros = jnp.zeros(len(ROWS), jnp.int32)
    active = jnp.asarray(~((slot_T == 1) & (offset_T == 2)))
    nothing = jnp.zeros((len(ROWS), 0), jnp.int32)
    every = BatchRows(
        jnp.asarray(slot_T), nothing, nothing.astype(jnp.float32), zeros, zeros, active
    )
    return DraftRows(every, jnp.asarray(slot_T), jnp.asarray(offset_T), jnp.asarray(index_BQ))


@pytest.mark.parametrize(
    ("name",),
    first_quick(
        [("qwen3_next",), ("granite4_hybrid",), ("kimi_linear",), ("lfm2",), ("minimax",)], ci=2
    ),
)
def test_rows_are_successive_steps(name: str) -> None:
    model = load_model(Path(GOLDEN / name), Layout(), jax.devices()[:1]).model
    number = next(at for at, layer in enumerate(model.kv_spec.layers) if layer.state)
    mixer, parts = model.layers[number].attention, model.kv_spec.layers[number].state
    random = np.random.default_rng(3)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    pages = tuple(normal(SLOTS, part.heads, 1, part.width) for part in parts)
    x_TD, step, slot_B = normal(len(ROWS), model.config.width), rows_of_step(), jnp.array([2, 0])

    @jax.jit
    def one(pages: LayerPages, x_BD: jax.Array, slot_B: jax.Array) -> tuple[jax.Array, LayerPages]:
        kept: list[LayerPages] = []
        return mixer(x_BD, recur_over(pages, slot_B, None, None, kept.append), Shards()), kept[0]

    @jax.jit
    def at_once(pages: LayerPages, count_B: jax.Array) -> tuple[jax.Array, LayerPages]:
        states = DraftedStates(step, slot_B)
        out_TD = mixer(x_TD, states.over(pages), Shards())
        return out_TD, states.settled(count_B)[0]

    expected, after = pages, [pages]
    for offset in range(2):  # the third row of slot 1 is inactive
        rows = [ROWS.index((slot, offset)) for slot in range(2)]
        out_BD, expected = one(expected, x_TD[jnp.array(rows)], slot_B)
        after.append(expected)
        got_TD, _ = at_once(pages, jnp.array([1, 1]))
        np.testing.assert_allclose(got_TD[jnp.array(rows)], out_BD, atol=2e-5)
    alone = jnp.array([2, NOBODY])
    third = ROWS.index((0, 2))
    out_BD, _ = one(expected, x_TD[jnp.array([third, third])], alone)
    np.testing.assert_allclose(got_TD[third], out_BD[0], atol=2e-5)
    for first in range(3):
        for second in range(3):
            _, settled = at_once(pages, jnp.array([first, second]))
            for part, *wanted in zip(settled, *after, strict=True):
                np.testing.assert_allclose(part[2], wanted[first][2], atol=2e-5)
                np.testing.assert_allclose(part[0], wanted[second][0], atol=2e-5)
                np.testing.assert_array_equal(part[1], wanted[0][1])
