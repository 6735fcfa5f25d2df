"""Packed prefill attention against dense attention in float64, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import prefill_attention_cudnn
from jdisagg.ops.prefill_attention import prefill_attention
from tests.lanes import first_quick
from tests.ops.prefill_chunks import SINKS_N, Chunk

pytestmark = pytest.mark.one_device


@pytest.mark.parametrize(
    ("window", "query_block"), first_quick([(7, 48), (None, 48), (1, 48), (100, 128)], ci=3)
)
def test_packed_segments_see_only_their_own_earlier_tokens(
    window: int | None, query_block: int
) -> None:
    chunk = Chunk([(0, 1), (0, 40), (0, 3), (0, 90), (0, 17)])
    got = chunk.run(past=False, window=window, query_block=query_block)
    np.testing.assert_allclose(got, chunk.expected(window), atol=1e-5)
    assert (got[chunk.segment < 0] == 0).all()


@pytest.mark.parametrize(
    ("window", "slots"), first_quick([(5, 16), (None, 8), (None, 128), (150, 8)], quick=2, ci=2)
)
def test_a_chunk_continues_sequences_that_lie_in_pages(window: int | None, slots: int) -> None:
    chunk = Chunk([(200, 30), (9, 50), (1, 1), (0, 25)], slots=slots)
    np.testing.assert_allclose(
        chunk.run(past=True, window=window, query_block=64), chunk.expected(window), atol=1e-5
    )


def test_an_unused_past_changes_nothing() -> None:
    chunk = Chunk([(0, 20), (0, 30)])
    np.testing.assert_allclose(chunk.run(past=True), chunk.run(past=False), atol=1e-6)


@pytest.mark.parametrize(
    ("past", "window", "cap", "platform"),
    first_quick(
        [
            (True, 30, 0.7, "cpu"),
            (True, 7, 0.7, "gpu"),  # there without loops, of one row with a past
            (False, None, 0.7, "cpu"),
            (True, None, 0.7, "tpu"),
            (False, 7, 0.7, "tpu"),
            (False, 30, 0.0, "gpu"),
        ],
        quick=2,
        ci=2,
    ),
)
def test_sinks_take_their_part_and_capped_scores_are_capped(
    past: bool, window: int | None, cap: float, platform: str
) -> None:
    chunk = Chunk([(90 if past else 0, 40), (0, 25)])
    how = {"window": window, "cap": cap, "sinks_N": SINKS_N}
    want = chunk.expected(**how)
    assert np.abs(want - chunk.expected(window)).max() > 0.1
    got = chunk.run(past=past, query_block=48, platform=platform, **how)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("packed", "window"),
    first_quick([(True, 600), (False, None), (True, None), (False, 300)], ci=3),
)
def test_long_chunks_take_the_key_block_loop(packed: bool, window: int | None) -> None:
    rows = [(0, 700), (0, 450)] if packed else [(0, 1100)]
    chunk = Chunk(rows, heads=1, groups=2, width=8)
    for how in ({}, {"cap": 0.7, "sinks_N": np.array([0.5, -1], np.float32)}):
        got = chunk.run(past=False, packed=packed, window=window, query_block=256, **how)
        np.testing.assert_allclose(got, chunk.expected(window, **how), atol=1e-5)


def test_one_sequence_over_several_groups_of_queries_reads_its_past_each_time() -> None:
    chunk = Chunk([(50, 600)], heads=1, groups=2, width=8)
    np.testing.assert_allclose(
        chunk.run(past=True, packed=False, query_block=256), chunk.expected(), atol=1e-5
    )


def test_bfloat16_stays_within_its_rounding() -> None:
    chunk = Chunk([(40, 60), (0, 30)], width=64)
    want = chunk.expected()
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    past = chunk.past._replace(
        k_pages_PKSH=low(chunk.past.k_pages_PKSH), v_pages_PKSH=low(chunk.past.v_pages_PKSH)
    )
    attend = jax.jit(functools.partial(prefill_attention, scale=chunk.scale))
    got = attend(
        low(chunk.q),
        low(chunk.k),
        low(chunk.v),
        jnp.asarray(chunk.segment),
        jnp.asarray(chunk.positions),
        past,
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=4e-2)


CUDNN: list[tuple[list[tuple[int, int]], int | None, bool]] = [
    ([(40, 9), (0, 1), (0, 30)], 6, False),
    ([(100, 33)], 30, True),
    ([(40, 9), (0, 1), (0, 30)], None, True),
    ([(0, 17)], 6, True),
    ([(0, 12), (0, 25)], 1, False),
    ([(3, 20)], None, False),
    ([(0, 12), (0, 25)], None, False),
    ([(100, 33)], 1, False),
    ([(40, 9), (0, 1), (0, 30)], 30, True),
    ([(3, 20)], 6, False),
]


@pytest.mark.parametrize(("rows", "window", "sinks"), first_quick(CUDNN, quick=4, ci=6))
def test_the_cudnn_recipes_see_what_they_should_and_give_sinks_their_part(
    rows: list[tuple[int, int]], window: int | None, sinks: bool
) -> None:
    chunk = Chunk(rows)
    sinks_N = SINKS_N if sinks else None
    attend = functools.partial(
        prefill_attention_cudnn.attend,
        scale=chunk.scale,
        window=window,
        sinks_N=None if sinks_N is None else jnp.asarray(sinks_N),
        packed=len(rows) > 1,
        rows=16,
        implementation="xla",
    )
    arrays = [jnp.asarray(part) for part in (chunk.q, chunk.k, chunk.v, chunk.segment)]
    past = None if sinks and rows[0][0] == 0 else chunk.past  # elsewhere a past of no tokens
    real = chunk.segment >= 0
    got = np.asarray(jax.jit(attend)(*arrays, past))
    np.testing.assert_allclose(got[real], chunk.expected(window, sinks_N=sinks_N)[real], atol=1e-5)


def test_sums_of_packed_segments_are_found_in_the_rows_that_hold_them() -> None:
    """cuDNN's sums for segments of 3, 1 and 2 tokens of a chunk of 8 that ends in padding."""
    segment_T, first_R = np.array([0, 0, 0, 1, 2, 2, -1, -1]), np.array([0, 3, 4, -1])
    sums_RNT = np.arange(4 * 2 * 8, dtype=np.float32).reshape(4, 2, 8)
    got = prefill_attention_cudnn.of_packed(
        jnp.asarray(sums_RNT), jnp.asarray(segment_T), jnp.asarray(first_R)
    )
    want = [
        sums_RNT[row, :, place] for row, place in ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))
    ]
    np.testing.assert_array_equal(np.asarray(got)[:6, :, 0], want)


def test_cudnn_is_chosen_where_it_has_kernels() -> None:
    half, single, wide, wider = (
        jnp.zeros((1, 2, 64), jnp.bfloat16),
        jnp.zeros((1, 2, 64)),
        jnp.zeros((1, 2, 256), jnp.bfloat16),
        jnp.zeros((1, 2, 512), jnp.bfloat16),
    )
    applies = prefill_attention_cudnn.applies
    assert applies(wide, platform="gpu", device_kind="NVIDIA H200")
    assert not applies(wider, platform="gpu", device_kind="NVIDIA H200")
    assert not applies(wide, platform="gpu", device_kind="NVIDIA GB200")
    assert applies(half, platform="gpu")
    assert not applies(half, platform="cpu")
    assert not applies(single, platform="gpu")
    assert not applies(wide, platform="gpu")
