"""Products with the LoRA adapters of many slots, against numpy's products with each row's own
factors."""

import jax
import numpy as np
import pytest

from jdisagg.ops.adapters import Factors, add_adapters, add_one

TOKENS, WIDTH, OUT, SLOTS, RANK = 13, 24, 32, 3, 4


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, Factors]:
    """Returns products, rows and the factors of all slots."""
    rng = np.random.default_rng(seed)
    shapes = (TOKENS, OUT), (TOKENS, WIDTH), (WIDTH, SLOTS, RANK), (SLOTS, RANK, OUT)
    y, x, a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return y, x, Factors(jax.numpy.asarray(a), jax.numpy.asarray(b))


@pytest.mark.parametrize("seed", range(2))
def test_tokens_get_their_own_adapter_and_others_keep_every_bit(seed: int) -> None:
    y, x, factors = drawn(seed)
    slots = np.random.default_rng(seed).integers(0, SLOTS + 1, TOKENS).astype(np.int32)
    assert 0 in slots and len(set(slots)) > 2
    got = np.asarray(jax.jit(add_adapters, static_argnums=4)(y, x, factors, slots, _product))
    a, b = np.asarray(factors.a_IGR), np.asarray(factors.b_GRO)
    for row, slot in enumerate(slots):
        if slot == 0:
            assert got[row].tobytes() == y[row].tobytes()
        else:
            wanted = y[row] + x[row] @ a[:, slot - 1] @ b[slot - 1]
            np.testing.assert_allclose(got[row], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slot", [0, SLOTS])
def test_one_adapter_of_all_tokens_is_added_and_slot_0_keeps_every_bit(slot: int) -> None:
    y, x, factors = drawn(slot)
    got = np.asarray(jax.jit(add_one, static_argnums=4)(y, x, factors, slot, "cpu"))
    if slot == 0:
        assert got.tobytes() == y.tobytes()
    else:
        a, b = np.asarray(factors.a_IGR)[:, slot - 1], np.asarray(factors.b_GRO)[slot - 1]
        np.testing.assert_allclose(got, y + x @ a @ b, rtol=1e-4, atol=1e-4)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return rows @ matrix
