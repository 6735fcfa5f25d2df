"""Random packed chunks of a prefill, with dense attention in float64 as the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.ops.prefill_attention import PastPages, prefill_attention
from tests.ops.attention_oracle import dense

SINKS_N = np.array([-3, 0, 1.5, 4, 60, -90], np.float32)  # the fifth leaves next to nothing


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
