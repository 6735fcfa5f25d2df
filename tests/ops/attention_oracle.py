"""An attention oracle in float64, one query and one head at a time, and random cases for it.

`cap` bounds scores through a tanh. `sinks` give each head a score without a value.
"""

import numpy as np


def dense(
    q_NH: np.ndarray,
    k_LKH: np.ndarray,
    v_LKH: np.ndarray,
    scale: float,
    cap: float = 0.0,
    sinks_N: np.ndarray | None = None,
) -> np.ndarray:
    """One query over all of its keys, in float64."""
    groups = q_NH.shape[0] // k_LKH.shape[1]
    out = np.empty(q_NH.shape, np.float64)
    for n in range(q_NH.shape[0]):
        s = k_LKH[:, n // groups].astype(np.float64) @ q_NH[n].astype(np.float64) * scale
        if cap:
            s = np.tanh(s / cap) * cap
        top = s.max() if sinks_N is None else max(s.max(), sinks_N[n])
        p, sunk = np.exp(s - top), 0.0 if sinks_N is None else np.exp(float(sinks_N[n]) - top)
        out[n] = p @ v_LKH[:, n // groups].astype(np.float64) / (p.sum() + sunk)
    return out


def case(
    batch: int, heads: int, groups: int, slots: int, columns: int, width: int, seed: int = 0
) -> tuple[np.ndarray, ...]:
    """Returns q, k pages, v pages and a random table. Unused entries are out of range or pages of
    others."""
    rng = np.random.default_rng(seed)
    pages = batch * columns + 3
    q = rng.standard_normal((batch, heads * groups, width)).astype(np.float32)
    k, v = rng.standard_normal((2, pages, heads, slots, width)).astype(np.float32)
    table = rng.permutation(pages)[: batch * columns].reshape(batch, columns).astype(np.int32)
    return q, k, v, table


def several(q: np.ndarray, tokens: int) -> np.ndarray:
    """Queries of that many tokens for each sequence of a case, in the order of the sequences."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((len(q) * tokens, *q.shape[1:])).astype(np.float32)


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    cap: float = 0.0,
    sinks_N: np.ndarray | None = None,
) -> np.ndarray:
    slots, scale, rows = k.shape[2], q.shape[-1] ** -0.5, []
    for b, position in enumerate(positions):
        seen = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
        at = table[b, seen // slots], slice(None), seen % slots
        rows.append(dense(q[b], k[at], v[at], scale, cap, sinks_N))
    return np.stack(rows)
