"""Estimates the performance of fused chunked prefill, in which an instance runs each prefill chunk
in one step with the decoding sequences. It is the strongest alternative to disaggregation.

A step takes the time of a decode step, plus an extra time if any dp rank of the instance has a
chunk. The extra time is less than the time of the chunk by itself, because weights are read once
for both, and decode steps leave arithmetic units idle. A chunk holds a piece of a prompt, or all
prompts that arrive during a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jdisagg.costs.cost_model import CostModel

TOKENS = np.geomspace(1, 1 << 15, 61)  # table points: tokens of a step
COARSE = 16  # batches above COARSE^2 are rounded up to multiples of it
ROUNDS = 40


@dataclass(frozen=True, slots=True)
class FusedPace:
    """Steady state of one dp rank at a constant request rate. All times are in seconds.

    Attributes:
      chunk: Mean time that a prefill chunk adds to a step.
      busy: Fraction of the steps in which the rank runs a chunk. met: Fraction of the steps in
        which any rank of the instance runs a chunk. held: For each sampled prompt, the time for
        which it occupies the rank's prefill capacity. spent: For each sampled prompt, the time from
        the start of its first chunk to its first token.
    """

    sequences: float
    decode: float
    step: float
    chunk: float
    busy: float
    met: float
    held: np.ndarray
    spent: np.ndarray


class StepTable:
    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._mixed = np.array([_mixed(model, tokens) for tokens in TOKENS])
        self._decode = np.array([model.decode_of(round(count), 0.0).seconds for count in TOKENS])

    def mixed(self, tokens: np.ndarray | float) -> np.ndarray:
        return np.asarray(np.interp(tokens, TOKENS, self._mixed))

    def alone(self, sequences: float) -> float:
        return float(np.interp(sequences, TOKENS, self._decode))

    def decode(self, sequences: float, context: float) -> float:
        whole = max(1, math.ceil(sequences))
        if whole > COARSE * COARSE:
            whole = COARSE * math.ceil(whole / COARSE)  # bounds the cache
        return self.model.decode_seconds(whole, max(1.0, sequences) * context)


class FusedChunks:
    """Estimates the steady state of one layout, with chunks of at most `chunk` tokens, for a sample
    of prompt lengths. `gathers`: whether the chunks of all dp ranks run in the same steps."""

    def __init__(
        self,
        table: StepTable,
        chunk: int,
        prompts: np.ndarray,
        context: float,
        steps: float,
        *,
        gathers: bool = False,
    ) -> None:
        self._table, self._chunk, self._context, self._steps = table, chunk, context, steps
        self._ranks = 1 if gathers else table.model.layout.dp  # with chunks in different steps
        self._prompts = prompts.astype(float)
        self._mean = float(self._prompts.mean())
        self._attention = each_once(prompts, self._attended)
        self._known: dict[float, FusedPace | None] = {}

    def _attended(self, prompt: int) -> float:
        done, seconds = 0, 0.0
        while done < prompt:
            new = min(self._chunk, prompt - done)
            alone = self._table.model.prefill([(new, done)]).seconds
            seconds += max(0.0, alone - float(self._table.mixed(new)))
            done += new
        return seconds

    def pace(self, rate: float) -> FusedPace | None:
        if rate not in self._known:
            self._known[rate] = self._settled(rate)
        return self._known[rate]

    def _settled(self, rate: float) -> FusedPace | None:
        # Iterates upwards from the result for a lower rate, or from one sequence.
        lower = [known for known, pace in self._known.items() if known < rate and pace]
        near = self._known[max(lower)] if lower else None
        step = near.step if near else self._table.decode(1, self._context)
        found = None
        for _ in range(ROUNDS):
            found = self._after(rate, step)
            if found is None or found.step > 1e3:
                return None
            if abs(found.step - step) <= 1e-3 * step:
                break
            step = found.step
        return found if found is not None and found.step <= 1.05 * step else None

    def _after(self, rate: float, step: float) -> FusedPace | None:
        count = rate * self._steps * step
        if count > 1e6:
            return None
        decode = self._table.decode(count, self._context)
        # Tokens of the chunk that holds a prompt, and the chunks that the prompt takes.
        shared = np.minimum(self._chunk, np.maximum(self._prompts, rate * self._mean * step))
        parts = self._prompts / shared
        more = self._table.mixed(shared + count) - self._table.alone(max(1.0, count))
        added = np.maximum(more, 0.0) * parts + self._attention
        chunks = float(np.add.reduce(parts))
        busy = rate * step * chunks / len(parts)
        if busy >= 1:
            return None
        met = 1 - (1 - busy) ** self._ranks
        chunk = float(np.add.reduce(added)) / chunks
        whole_parts = np.ceil(self._prompts / self._chunk)
        return FusedPace(
            sequences=count,
            decode=decode,
            step=decode + met * chunk,
            chunk=chunk,
            busy=busy,
            met=met,
            held=parts * decode + added,
            # A chunk waits for the running step and for the step that was issued ahead.
            spent=whole_parts * decode + added * np.maximum(1.0, 1 / parts) + step,
        )

    def within(self, pace: FusedPace, limit: float, outputs: np.ndarray) -> float:
        """Returns the fraction of requests whose mean time per token is at most `limit` seconds.

        `outputs`: number of output tokens of each request."""
        spread = pace.chunk * math.sqrt(pace.met * (1 - pace.met))
        kept = 0.0
        for count, number in zip(*np.unique(outputs - 1, return_counts=True), strict=True):
            if count <= 0:
                kept += number
            elif spread <= 0:
                kept += number * (pace.step <= limit)
            else:
                kept += number * _normal((limit - pace.step) * math.sqrt(count) / spread)
        return kept / len(outputs)


def each_once(lengths: np.ndarray, seconds_of: Callable[[int], float]) -> np.ndarray:
    different, places = np.unique(lengths, return_inverse=True)
    return np.array([seconds_of(int(length)) for length in different])[places]


def _mixed(model: CostModel, tokens: float) -> float:
    return model.mixed_of(round(tokens), 0.0, 0.0, 1, 0, 0.0).seconds


def _normal(deviations: float) -> float:
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))
