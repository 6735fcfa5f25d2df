"""Dense attention against a loop over tokens and heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops.dense_attention import dense_causal_attend

pytestmark = pytest.mark.one_device


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_each_token_sees_itself_and_its_window_of_the_past(window: int | None, more: bool) -> None:
    tokens, heads, kv_heads, head = 7, 4, 2, 8
    random = np.random.default_rng(0)
    q, k, v = (
        random.normal(size=(tokens, count, head)).astype(np.float32)
        for count in (heads, kv_heads, kv_heads)
    )
    cap, sinks = (0.4, jnp.asarray([-1, 0, 2, 50], jnp.float32)) if more else (0.0, None)
    got = dense_causal_attend(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        scale=0.3,
        window=window,
        cap=cap,
        sinks_N=sinks,
    )
    for token in range(tokens):
        seen = slice(max(0, token - (window or tokens) + 1), token + 1)
        for n in range(heads):
            scores = 0.3 * k[seen, n // 2] @ q[token, n]
            weights = np.exp(cap * np.tanh(scores / cap) if cap else scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[n])))
            np.testing.assert_allclose(got[token, n], weights @ v[seen, n // 2] / total, atol=1e-5)
