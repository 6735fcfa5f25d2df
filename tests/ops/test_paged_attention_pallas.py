"""The GPU kernel in interpret mode, against the same dense oracle as the XLA forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import paged_attention_pallas
from tests.lanes import first_quick
from tests.ops.attention_oracle import case, expected, several

pytestmark = pytest.mark.one_device


def run(
    arrays: tuple[np.ndarray, ...],
    positions: np.ndarray,
    dtype: str,
    window: int | None = None,
    splits: int | None = None,
    cap: float = 0.0,
    sinks_N: np.ndarray | None = None,
) -> jax.Array:
    q, k, v, table = arrays
    attend = functools.partial(
        paged_attention_pallas.paged_attention,
        scale=q.shape[-1] ** -0.5,
        window=window,
        splits=splits,
        cap=cap,
        sinks_N=sinks_N,
        interpret=True,
    )
    return jax.jit(attend)(
        *(jnp.asarray(x).astype(dtype) for x in (q, k, v)),
        jnp.asarray(table),
        jnp.asarray(positions.reshape(len(table), -1)),
    )


@pytest.mark.parametrize(
    ("heads", "groups", "slots", "columns", "window", "splits", "dtype"),
    first_quick(
        [
            # no sharing of heads; a table that no block divides; a window inside a page
            (2, 1, 8, 33, 100, 3, "float32"),
            # as many splits as steps: some get nothing from short sequences
            (2, 4, 16, 20, None, None, "bfloat16"),
            # more query heads than one tensor-core block has rows
            (1, 20, 128, 3, None, 1, "float32"),
            (1, 20, 128, 3, None, 1, "bfloat16"),
        ],
        quick=2,
        ci=2,
    ),
)
def test_the_kernel_agrees_with_dense_attention(
    heads: int,
    groups: int,
    slots: int,
    columns: int,
    window: int | None,
    splits: int | None,
    dtype: str,
) -> None:
    q, k, v, table = case(
        batch=4, heads=heads, groups=groups, slots=slots, columns=columns, width=32
    )
    positions = np.array([0, slots * columns - 1, 100, 64], np.int32)
    for b, position in enumerate(positions):
        table[b, position // slots + 1 :] = 10**6  # beyond the length: anything
    got = run((q, k, v, table), positions, dtype, window, splits)
    assert got.dtype == dtype
    rounded = [np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32)) for x in (q, k, v)]
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        got.astype(jnp.float32), expected(*rounded, table, positions, window), atol=tolerance
    )


@pytest.mark.parametrize(("width",), first_quick([(256,), (512,)]))
def test_wide_heads_are_walked_in_shorter_steps(width: int) -> None:
    q, k, v, table = case(batch=3, heads=1, groups=4, slots=32, columns=4, width=width)
    positions = np.array([0, 127, 70], np.int32)
    got = run((q, k, v, table), positions, "float32", 100, 2)
    np.testing.assert_allclose(got, expected(q, k, v, table, positions, 100), atol=1e-4)


@pytest.mark.parametrize(("window",), first_quick([(50,), (None,)]))
def test_several_tokens_of_a_sequence_see_each_their_own_past(window: int | None) -> None:
    """With sinks and capped scores."""
    q, k, v, table = case(batch=3, heads=2, groups=3, slots=16, columns=10, width=16)
    q = several(q, 4)
    positions = np.array([[0, 1, 2, 0], [150, 151, 152, 153], [70, 71, 70, 70]], np.int32)
    sinks_N = np.array([-2, 1, 60, 3, 2, 1], np.float32)
    got = run((q, k, v, table), positions, "float32", window, 3, 0.7, sinks_N)
    flat, each = np.repeat(table, 4, axis=0), positions.reshape(-1)
    np.testing.assert_allclose(got, expected(q, k, v, flat, each, window, 0.7, sinks_N), atol=1e-5)


def test_a_long_sequence_in_a_batch_that_fills_the_gpu_is_walked_by_several_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention_pallas, "PROGRAMS", 1)
    monkeypatch.setattr(paged_attention_pallas, "SHARE", 128)
    arrays = case(batch=3, heads=1, groups=2, slots=64, columns=12, width=16)
    positions = np.array([767, 40, 130], np.int32)
    got = run(arrays, positions, "float32")
    np.testing.assert_allclose(got, expected(*arrays, positions, None), atol=1e-5)
    at = jnp.asarray(positions)
    shares = paged_attention_pallas.shares(at, at, None, 1, 6, 64)[2]
    assert shares.tolist() == [2, 1, 2]  # steps of 64 positions a program: 12, 1 and 3 of them


def test_a_row_without_a_sequence_gives_zeros_and_stale_pages_are_not_read() -> None:
    q, k, v, table = case(batch=2, heads=1, groups=2, slots=16, columns=8, width=16)
    positions = np.array([20, -1], np.int32)
    # behind the last token, which is slot 4 of that page
    k[table[0, 1], :, 5:] = v[table[0, 1], :, 5:] = np.nan
    got = run((q, k, v, table), positions, "float32")
    np.testing.assert_allclose(
        got[:1], expected(q[:1], k, v, table, positions[:1], None), atol=1e-5
    )
    np.testing.assert_array_equal(got[1], 0)


def test_the_kernel_applies_to_power_of_two_heads_of_the_pages_dtype() -> None:
    def applies(width: int, q_dtype: str, kv_dtype: str) -> bool:
        return paged_attention_pallas.applies(
            jnp.zeros((1, 2, width), q_dtype), jnp.zeros((1, 1, 8, width), kv_dtype)
        )

    assert applies(64, "bfloat16", "bfloat16") and applies(128, "float32", "float32")
    assert applies(512, "bfloat16", "bfloat16") and not applies(1024, "bfloat16", "bfloat16")
    assert not applies(80, "bfloat16", "bfloat16")
    assert not applies(64, "float32", "bfloat16")
