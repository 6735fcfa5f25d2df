"""Packed prefill attention against dense attention in float64, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import prefill_attention_cudnn
from jdisagg.ops.prefill_attention import PastPages, prefill_attention
from tests.ops.attention_oracle import dense

pytestmark = pytest.mark.one_device


class Chunk:
    """A random packed chunk of rows (past tokens, new tokens), rows with a past first, with padding
    between and after."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int = 2,
        groups: int = 3,
        width: int = 16,
        slots: int = 8,
        padding: int = 5,
    ) -> None:
        rng = np.random.default_rng(len(rows))
        self.scale, self.groups = width**-0.5, groups
        full = [
            rng.standard_normal((2, old + new, heads, width)).astype(np.float32)
            for old, new in rows
        ]
        tokens = sum(new for _, new in rows) + padding
        self.q = rng.standard_normal((tokens, heads * groups, width)).astype(np.float32)
        self.k, self.v = rng.standard_normal((2, tokens, heads, width)).astype(np.float32)
        self.segment = np.full(tokens, -1, np.int32)
        self.positions = np.zeros(tokens, np.int32)
        columns = max(1, max((old + slots - 1) // slots for old, _ in rows)) + 1
        pages = len(rows) * columns + 2
        k_pages, v_pages = rng.standard_normal((2, pages, heads, slots, width)).astype(np.float32)
        table = (
            rng.permutation(pages)[: len(rows) * columns]
            .reshape(len(rows), columns)
            .astype(np.int32)
        )
        self.full, self.rows, at = full, rows, 0
        for row, (old, new) in enumerate(rows):
            self.k[at : at + new], self.v[at : at + new] = full[row][:, old:]
            self.segment[at : at + new] = row
            self.positions[at : at + new] = np.arange(old, old + new)
            for position in range(old):
                page, slot = table[row, position // slots], position % slots
                k_pages[page, :, slot], v_pages[page, :, slot] = full[row][:, position]
            table[row, (old + slots - 1) // slots :] = 10**6
            at += new
        lengths, count = (
            np.array([old for old, _ in rows], np.int32),
            np.int32(sum(old > 0 for old, _ in rows)),
        )
        self.past = PastPages(*map(jnp.asarray, (k_pages, v_pages, table, lengths, count)))

    def expected(
        self, window: int | None = None, cap: float = 0.0, sinks_N: np.ndarray | None = None
    ) -> np.ndarray:
        out = np.zeros(self.q.shape, np.float64)
        for t, (row, position) in enumerate(zip(self.segment, self.positions, strict=True)):
            if row >= 0:
                seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
                keys, values = self.full[row][0, seen], self.full[row][1, seen]
                out[t] = dense(self.q[t], keys, values, self.scale, cap, sinks_N)
        return out

    def run(
        self,
        *,
        past: bool,
        window: int | None = None,
        query_block: int = 128,
        packed: bool = True,
        cap: float = 0.0,
        sinks_N: np.ndarray | None = None,
        platform: str = "cpu",
    ) -> np.ndarray:
        arrays = map(jnp.asarray, (self.q, self.k, self.v, self.segment, self.positions))
        attend = functools.partial(
            prefill_attention,
            scale=self.scale,
            window=window,
            query_block=query_block,
            packed=packed,
            cap=cap,
            sinks_N=sinks_N,
            platform=platform,
        )
        return np.asarray(jax.jit(attend)(*arrays, self.past if past else None))


@pytest.mark.parametrize(("window", "query_block"), [(None, 48), (1, 48), (7, 128), (100, 48)])
def test_packed_segments_see_only_their_own_earlier_tokens(
    window: int | None, query_block: int
) -> None:
    chunk = Chunk([(0, 1), (0, 40), (0, 3), (0, 90), (0, 17)])
    got = chunk.run(past=False, window=window, query_block=query_block)
    np.testing.assert_allclose(got, chunk.expected(window), atol=1e-5)
    assert (got[chunk.segment < 0] == 0).all()


@pytest.mark.parametrize(("window", "slots"), [(None, 8), (None, 128), (5, 16), (150, 8)])
def test_a_chunk_continues_sequences_that_lie_in_pages(window: int | None, slots: int) -> None:
    chunk = Chunk([(200, 30), (9, 50), (1, 1), (0, 25)], slots=slots)
    np.testing.assert_allclose(
        chunk.run(past=True, window=window, query_block=64), chunk.expected(window), atol=1e-5
    )


def test_an_unused_past_changes_nothing() -> None:
    chunk = Chunk([(0, 20), (0, 30)])
    np.testing.assert_allclose(chunk.run(past=True), chunk.run(past=False), atol=1e-6)


@pytest.mark.parametrize(
    "platform", ["cpu", "tpu", "gpu"]
)  # there without loops, of one row with a past
@pytest.mark.parametrize(("window", "cap"), [(None, 0.7), (30, 0.0), (7, 0.7)])
@pytest.mark.parametrize("past", [False, True])
def test_sinks_take_their_part_and_capped_scores_are_capped(
    past: bool, window: int | None, cap: float, platform: str
) -> None:
    chunk = Chunk([(90 if past else 0, 40), (0, 25)])
    sinks_N = np.array([-3, 0, 1.5, 4, 60, -90], np.float32)  # the fifth leaves next to nothing
    how = {"window": window, "cap": cap, "sinks_N": sinks_N}
    want = chunk.expected(**how)
    assert np.abs(want - chunk.expected(window)).max() > 0.1
    got = chunk.run(past=past, query_block=48, platform=platform, **how)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("packed", "window"), [(True, None), (False, None), (True, 600), (False, 300)]
)
def test_long_chunks_take_the_key_block_loop(packed: bool, window: int | None) -> None:
    rows = [(0, 700), (0, 450)] if packed else [(0, 1100)]
    chunk = Chunk(rows, heads=1, groups=2, width=8)
    np.testing.assert_allclose(
        chunk.run(past=False, packed=packed, window=window, query_block=256),
        chunk.expected(window),
        atol=1e-5,
    )
    sinks_N = np.array([0.5, -1], np.float32)
    np.testing.assert_allclose(
        chunk.run(past=False, packed=packed, window=window, cap=0.7, sinks_N=sinks_N),
        chunk.expected(window, 0.7, sinks_N),
        atol=1e-5,
    )


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


@pytest.mark.parametrize(("old", "new"), [(0, 20), (1, 7), (100, 33)])
def test_the_cudnn_recipe_merges_past_and_self(old: int, new: int) -> None:
    chunk = Chunk([(old, new)])
    arrays = map(jnp.asarray, (chunk.q, chunk.k, chunk.v))
    attend = functools.partial(
        prefill_attention_cudnn.one_sequence, scale=chunk.scale, window=None, implementation="xla"
    )
    got = np.asarray(jax.jit(attend)(*arrays, np.int32(new), chunk.past))
    np.testing.assert_allclose(got[:new], chunk.expected()[:new], atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 6])
def test_the_cudnn_recipe_without_a_past_keeps_the_window(window: int | None) -> None:
    chunk = Chunk([(0, 20)])
    arrays = map(jnp.asarray, (chunk.q, chunk.k, chunk.v))
    attend = functools.partial(
        prefill_attention_cudnn.one_sequence, scale=chunk.scale, window=window, implementation="xla"
    )
    got = np.asarray(jax.jit(attend)(*arrays, np.int32(20), None))
    np.testing.assert_allclose(got[:20], chunk.expected(window)[:20], atol=1e-5)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("rows", [[(100, 33)], [(0, 17)], [(40, 9), (0, 1), (0, 30)]])
def test_the_cudnn_recipes_give_sinks_their_part(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    chunk = Chunk(rows)
    sinks_N = np.array([-3, 0, 1.5, 4, 60, -90], np.float32)
    arrays = [jnp.asarray(part) for part in (chunk.q, chunk.k, chunk.v, chunk.segment)]
    how = {"scale": chunk.scale, "window": window, "sinks_N": jnp.asarray(sinks_N)}
    attend = functools.partial(
        prefill_attention_cudnn.attend, packed=len(rows) > 1, rows=16, implementation="xla", **how
    )
    past = None if rows == [(0, 17)] else chunk.past
    got = np.asarray(jax.jit(attend)(*arrays, past))
    real = chunk.segment >= 0
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


@pytest.mark.parametrize("window", [None, 1, 6, 30, 400])
@pytest.mark.parametrize(
    "rows", [[(100, 33)], [(3, 20)], [(0, 17)], [(40, 9), (0, 1), (0, 30)], [(0, 12), (0, 25)]]
)
def test_the_cudnn_recipes_of_packed_chunks_and_of_windows_see_what_they_should(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    chunk = Chunk(rows)
    arrays = map(jnp.asarray, (chunk.q, chunk.k, chunk.v, chunk.segment))
    attend = functools.partial(
        prefill_attention_cudnn.attend,
        scale=chunk.scale,
        window=window,
        packed=len(rows) > 1,
        rows=16,
        implementation="xla",
    )
    got = np.asarray(jax.jit(attend)(*arrays, chunk.past))
    real = chunk.segment >= 0
    np.testing.assert_allclose(got[real], chunk.expected(window)[real], atol=1e-5)


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
