"""What one pool carries whose steps hold a prefill chunk and the decoding sequences together, by
arithmetic: the rival that a planner compares two pools with.

A dp rank steps at `Pace.step` seconds on average: a decode step, and in the part of the steps in
which a chunk runs on any rank of the instance, what that chunk adds. A chunk adds less than it
takes alone, because weights are read once for both and small matrices leave arithmetic idle, so
that small chunks may carry more than large ones. It holds what waits: at least a prompt or a chunk
of it, and at most the prompts that come during a step. A sequence's mean time per token spreads
about the mean with the number of chunks that it happens to meet, so that long chunks and short
answers miss a limit that the mean keeps.

Pure numbers: knows lengths and a cost model, no arrivals and no goal's meaning."""

import math
from dataclasses import dataclass

import numpy as np

from jdisagg.costs.cost_model import CostModel

MOST_TOKENS = 1 << 15  # of a step, in the table of steps
POINTS = 61
ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a rank under a steady rate. `sequences` decode; a step takes `decode` seconds without a
    chunk and `step` on average; `chunk`: seconds that one adds; `busy`: part of the steps that a
    rank has a chunk in, `met`: part in which any rank of the instance has one. `held`, `spent`: of
    each prompt of the sample, seconds that it takes of the rank's prefill and seconds from its
    first chunk to its first token."""

    sequences: float
    decode: float
    step: float
    chunk: float
    busy: float
    met: float
    held: np.ndarray
    spent: np.ndarray


class FusedChunks:
    """One layout with chunks of up to `chunk` tokens, and prompts of the lengths of a sample."""

    def __init__(
        self, model: CostModel, chunk: int, prompts: np.ndarray, context: float, steps: float
    ) -> None:
        self._model, self._chunk, self._context, self._steps = model, chunk, context, steps
        self._prompts = prompts.astype(float)
        self._mean = float(self._prompts.mean())
        self._tokens = np.geomspace(1, MOST_TOKENS, POINTS)
        self._seconds = np.array([_mixed(model, tokens) for tokens in self._tokens])
        self._attention = np.array([self._attended(int(tokens)) for tokens in prompts])
        self._known: dict[float, Pace | None] = {}

    def _attended(self, prompt: int) -> float:
        """What attention to the prompt's own tokens adds to its chunks."""
        done, seconds = 0, 0.0
        while done < prompt:
            new = min(self._chunk, prompt - done)
            alone = self._model.prefill([(new, done)]).seconds
            seconds += max(0.0, alone - self._at(new))
            done += new
        return seconds

    def _at(self, tokens: float) -> float:
        return float(np.interp(tokens, self._tokens, self._seconds))

    def pace(self, rate: float) -> Pace | None:
        """At `rate` requests a second of the rank; None where it cannot keep up."""
        if rate not in self._known:
            self._known[rate] = self._settled(rate)
        return self._known[rate]

    def _settled(self, rate: float) -> Pace | None:
        step = self._model.decode_of(1, self._context).seconds
        found = None
        for _ in range(ROUNDS):
            found = self._after(rate, step)
            if found is None or found.step > 1e3:
                return None
            if abs(found.step - step) <= 1e-3 * step:
                break
            step = found.step
        return found if found is not None and found.step <= 1.05 * step else None

    def _after(self, rate: float, step: float) -> Pace | None:
        """What follows where steps take `step` seconds."""
        count = rate * self._steps * step
        whole = max(1, math.ceil(count))
        decode = self._model.decode_of(whole, max(1.0, count) * self._context).seconds
        alone = self._model.decode_of(whole, 0.0).seconds
        # Tokens of the chunk that a prompt is in, and how many such chunks it is.
        shared = np.minimum(self._chunk, np.maximum(self._prompts, rate * self._mean * step))
        parts = self._prompts / shared
        more = np.interp(shared + count, self._tokens, self._seconds) - alone
        added = np.maximum(more, 0.0) * parts + self._attention
        busy = rate * step * float(parts.mean())
        if busy >= 1 or count > 1e6:
            return None
        met = 1 - (1 - busy) ** self._model.layout.dp
        chunk = float(added.mean() / parts.mean())
        whole_parts = np.ceil(self._prompts / self._chunk)
        return Pace(
            sequences=count,
            decode=decode,
            step=decode + met * chunk,
            chunk=chunk,
            busy=busy,
            met=met,
            held=parts * decode + added,
            # A chunk waits for the step under way and is issued behind the next one.
            spent=whole_parts * decode + added * np.maximum(1.0, 1 / parts) + step,
        )

    def within(self, pace: Pace, limit: float, outputs: np.ndarray) -> float:
        """The part of requests whose mean time per token keeps `limit`: of so many steps each, of
        which chunks lengthen the part `met`, by chance (a normal law)."""
        spread = pace.chunk * math.sqrt(pace.met * (1 - pace.met))
        kept = 0.0
        for count in outputs - 1:
            if count <= 0:
                kept += 1
            elif spread <= 0:
                kept += pace.step <= limit
            else:
                kept += _normal((limit - pace.step) * math.sqrt(count) / spread)
        return kept / len(outputs)


def _mixed(model: CostModel, tokens: float) -> float:
    """A step of so many tokens, attention aside."""
    return model.mixed_of(round(tokens), 0.0, 0.0, 1, 0, 0.0).seconds


def _normal(deviations: float) -> float:
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))
