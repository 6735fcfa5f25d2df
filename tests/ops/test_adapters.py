"""Products with many adapters, against one product for each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.adapters import Factors, add_adapters

TOKENS, SLOTS, RANK, INTO, OUT = 16, 5, 2, 6, 7
EVEN = [number % 6 for number in range(TOKENS)]  # at most three of a slot
UNEVEN = [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 5, 4, 3, 0]


@pytest.mark.parametrize("slots", [EVEN, UNEVEN, [3] * TOKENS, [0] * TOKENS])
def test_each_token_gets_the_product_of_its_own_adapter_and_others_keep_their_bits(
    slots: list[int],
) -> None:
    rng = np.random.default_rng(0)
    x, y, a, b = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((TOKENS, INTO), (TOKENS, OUT), (INTO, SLOTS, RANK), (SLOTS, RANK, OUT))
    )
    run = jax.jit(lambda y, x, a, b, slot: add_adapters(y, x, Factors(a, b), slot, jnp.matmul))
    found = np.asarray(run(y, x, a, b, jnp.array(slots, jnp.int32)))
    for token, slot in enumerate(slots):
        if slot:
            own = y[token] + x[token] @ a[:, slot - 1] @ b[slot - 1]
            np.testing.assert_allclose(found[token], own, rtol=1e-5, atol=1e-5)
        else:
            assert found[token].tobytes() == y[token].tobytes()
