"""Predicts the times of prefills and decode steps for many workers at once (vectorised), so that a
placement decision can compare a thousand workers.

A `Speed` wraps the cost model of one kind of instance (geometry, layout, hardware, stages), or the
times that the instance measured. An instance that is neither described nor measured has the times
of an assumed accelerator. The duration of a decode step is interpolated, within 3 %, from a grid
over the number of sequences and their mean context. Has no side effects except for caches."""

import enum
import functools
import math
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np

from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import Accelerator, accelerator
from jdisagg.costs.measured import MeasuredCosts, StepTimes
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Seconds = TypeVar("Seconds", float, Array)

WHOLE_PROMPT_TOKENS = 2048  # chunk size of a worker that reports none
GRANULE_TOKENS = 16  # prompt lengths are rounded up to multiples of this
SEQUENCES = np.unique(np.round(np.geomspace(1, 4096, 49))).astype(float)
CONTEXTS = np.concatenate([[0.0], np.geomspace(64, 1 << 20, 29)])
CHUNKS = np.unique(np.round(np.geomspace(1, 16384, 49))).astype(float)


class PriceSource(enum.Enum):
    """Where predicted times come from: a description of the hardware (`--hardware`), or times that
    the worker measured at its start. ASSUMED: neither is known, and the times are those of
    `ASSUMED_HARDWARE`."""

    GIVEN = "given"
    MEASURED = "measured"
    ASSUMED = "assumed"

    __hash__ = object.__hash__  # by identity, which is fast, because lookups are frequent


@dataclass(frozen=True, slots=True)
class Kind:
    geometry: CostGeometry
    layout: Layout
    hardware: Accelerator | None
    dtype: str = "bfloat16"
    times: StepTimes | None = None

    @property
    def source(self) -> PriceSource:
        if self.hardware is not None:
            return PriceSource.GIVEN
        return PriceSource.ASSUMED if self.times is None else PriceSource.MEASURED


ASSUMED_HARDWARE = accelerator("h100")
ASSUMED = Kind(geometry("llama-3.1-8b"), Layout(), None)  # of a worker that describes no model


class Speed:
    """Estimates the duration of prefills and decode steps on one kind of instance.

    Raises:
      ConfigError, LayoutError: The layout does not divide the model.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.model = _model(kind)
        self.wire_bytes_per_token = wire_bytes_per_token(kind.geometry, self.model.value_bytes)
        times = kind.times or StepTimes()
        # Costs of measured programs jump behind each compiled size.
        counts = _with_jumps(SEQUENCES, times.batch_sizes)
        self._chunk_sizes = _with_jumps(CHUNKS, times.chunk_sizes)
        steps = np.array(
            [[self._step(sequences, context) for context in CONTEXTS] for sequences in counts]
        )
        self._steps = _Grid(steps, counts, CONTEXTS)
        self._chunks: _Grid | None = None
        self._prefills: dict[tuple[int, int, int], float] = {}
        self._rates: dict[int, tuple[float, float]] = {}

    def prefill_seconds(
        self, new_tokens: int, cached_tokens: int = 0, chunk_tokens: int = 0
    ) -> float:
        """Returns the seconds to prefill one prompt by itself, in chunks. The time of attention
        grows linearly from chunk to chunk, so the first and the last chunk determine the sum."""
        key = (-(-new_tokens // GRANULE_TOKENS) * GRANULE_TOKENS, cached_tokens, chunk_tokens)
        known = self._prefills.get(key)
        if known is None:
            if len(self._prefills) >= 1 << 16:
                self._prefills.clear()
            known = self._prefills[key] = self._prefill(*key)
        return known

    def backlog_rates(self, chunk_tokens: int = 0) -> tuple[float, float]:
        """Returns the prefill seconds per token and per (query, key) pair, to estimate the time of
        a queue of prompts. Assumes that the prompts are packed into full chunks of one dp rank."""
        chunk = chunk_tokens or WHOLE_PROMPT_TOKENS
        if chunk not in self._rates:
            few = self.model.prefill_of(chunk, 0.0, chunk, 1).seconds
            pairs = 64.0 * chunk * chunk
            pair = (self.model.prefill_of(chunk, pairs, chunk, 1).seconds - few) / pairs
            self._rates[chunk] = (few / chunk / self.kind.layout.pp, pair / self.kind.layout.pp)
        return self._rates[chunk]

    def step_seconds(self, sequences: Array, contexts: Array) -> Array:
        """Returns the seconds of a decode step of each worker. On its dp rank with the most work,
        worker i has `sequences[i]` sequences with `contexts[i]` context tokens in total."""
        sequences = np.minimum(np.maximum(sequences, SEQUENCES[0]), SEQUENCES[-1])
        return self._steps.between(sequences, contexts / sequences)

    def prefills_seconds(
        self, new_tokens: Array, cached_tokens: Array, chunk_tokens: int = 0
    ) -> Array:
        """Vectorised `prefill_seconds`, within 5 %. Chunks up to the largest size in `CHUNKS` are
        interpolated from a grid."""
        if not 0 < chunk_tokens <= CHUNKS[-1]:
            pairs = zip(new_tokens, cached_tokens, strict=True)
            return np.array(
                [self.prefill_seconds(int(new), int(cached), chunk_tokens) for new, cached in pairs]
            )
        whole = new_tokens // chunk_tokens
        rest = new_tokens - whole * chunk_tokens
        full = np.full(len(whole), float(chunk_tokens))
        last = cached_tokens + np.maximum(0.0, whole - 1) * chunk_tokens
        following = cached_tokens + whole * chunk_tokens
        # One lookup for all three: its cost hardly depends on the number of points.
        begins, ends, short = self._chunk(
            np.concatenate((full, full, np.maximum(1.0, rest))),
            np.concatenate((cached_tokens, last, following)),
        ).reshape(3, -1)
        seconds = whole * (begins + ends) / 2
        left = np.where(rest > 0, short, 0.0)
        return self._behind_each_other(seconds + left, np.where(rest > 0, left, ends))

    def _chunk(self, tokens: Array, cached: Array) -> Array:
        if self._chunks is None:
            chunks = np.array(
                [
                    [self.model.prefill([(int(new), int(known))]).seconds for known in CONTEXTS]
                    for new in self._chunk_sizes
                ]
            )
            self._chunks = _Grid(chunks, self._chunk_sizes, CONTEXTS)
        return self._chunks.between(np.minimum(np.maximum(tokens, CHUNKS[0]), CHUNKS[-1]), cached)

    def _step(self, sequences: float, context: float) -> float:
        fullest = math.ceil(sequences / self.kind.layout.pp)
        return self.model.decode_of(fullest, fullest * context).seconds

    def _prefill(self, new: int, cached: int, chunk_tokens: int) -> float:
        chunk = chunk_tokens or new
        if new <= chunk:
            return self.model.prefill([(new, cached)]).seconds
        whole, rest = divmod(new, chunk)
        last = self.model.prefill([(chunk, cached + (whole - 1) * chunk)]).seconds
        seconds = whole * (self.model.prefill([(chunk, cached)]).seconds + last) / 2
        left = self.model.prefill([(rest, cached + whole * chunk)]).seconds if rest else 0.0
        return self._behind_each_other(seconds + left, left or last)

    def _behind_each_other(self, every: Seconds, last: Seconds) -> Seconds:
        return (every - last) / self.kind.layout.pp + last


def _with_jumps(sizes: Array, jumps: tuple[int, ...]) -> Array:
    added = [size for jump in jumps for size in (jump, jump + 1) if size < sizes[-1]]
    return np.unique(np.concatenate((sizes, np.array(added, float)))) if added else sizes


def _model(kind: Kind) -> CostModel | MeasuredCosts:
    if kind.hardware is not None:
        return CostModel(kind.geometry, kind.hardware, kind.layout, dtype=kind.dtype)
    if kind.times is not None:
        return MeasuredCosts(kind.geometry, kind.times, kind.dtype)
    return CostModel(kind.geometry, ASSUMED_HARDWARE, kind.layout, dtype=kind.dtype)


class _Grid:
    """Precomputes everything that does not depend on the query, because every placement decision
    interpolates."""

    def __init__(self, values: Array, rows: Array, columns: Array) -> None:
        self._last, self._width = columns[-1], len(columns)
        # Searching the inner edges alone returns the cell index, clipped to the grid.
        self._inner_rows, self._inner_columns = rows[1:-1], columns[1:-1]
        self._row_cells = np.array([rows[:-1], rows[1:] - rows[:-1]])
        self._column_cells = np.array([columns[:-1], columns[1:] - columns[:-1]])
        flat = values.ravel()
        rises = flat[1:] - flat[:-1]
        above = slice(len(flat) - len(columns) - 1)
        # For each cell: value and rise to the next column, in this row and in the next row.
        self._corners = np.array(
            [flat[above], rises[above], flat[len(columns) : -1], rises[len(columns) :]]
        )

    def between(self, at_row: Array, at_column: Array) -> Array:
        """Rows must be within the table. Columns beyond the table are clipped to its range."""
        at_column = np.minimum(np.maximum(at_column, self._column_cells[0, 0]), self._last)
        row = self._inner_rows.searchsorted(at_row, "right")
        column = self._inner_columns.searchsorted(at_column, "right")
        begin, gap = self._row_cells.take(row, axis=1)
        down = (at_row - begin) / gap
        begin, gap = self._column_cells.take(column, axis=1)
        right = (at_column - begin) / gap
        value, rise, below, below_rise = self._corners.take(row * self._width + column, axis=1)
        above = value + rise * right
        return above + (below + below_rise * right - above) * down


@functools.lru_cache(maxsize=256)
def speed_of(kind: Kind) -> Speed:
    """Returns the cached `Speed` of a kind, or that of `ASSUMED` if its layout does not divide the
    model."""
    try:
        return Speed(kind)
    except (ConfigError, LayoutError):
        return speed_of(ASSUMED)


@overload
def exposed_seconds(
    transfer: float, prefill: float, pieces: float, waited: float = 0.0
) -> float: ...


@overload
def exposed_seconds(
    transfer: Array, prefill: Array, pieces: float | Array, waited: float = 0.0
) -> Array: ...


def exposed_seconds(
    transfer: float | Array, prefill: float | Array, pieces: float | Array, waited: float = 0.0
) -> float | Array:
    """Returns the seconds of a transfer that remain after the prefill has ended.

    The KV is sent in equal pieces, each of them after it was computed. The last piece is always
    sent after the prefill. If the links are slower than the prefill, so is part of the others.

    Args:
        pieces: Number of pieces: the chunks of a prompt, or the layer groups of a chunk.
        waited: Times for which the first piece waited for links that were busy.
    """
    last = transfer / pieces
    others = transfer + waited - prefill * (1.0 - 1.0 / pieces)
    return max(last, others) if isinstance(others, float) else np.maximum(last, others)
