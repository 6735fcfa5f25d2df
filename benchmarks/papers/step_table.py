"""Step times of BLOOM-176B on machines of eight GPUs, interpolated in Splitwise's own measurements
(benchmarks/data/splitwise_perf_model.csv.gz) in place of a cost model.

Prompts: by the number of their tokens. A step with prompts and decodes takes 1.1 times the prompts'
time, as in the paper's simulator (splitwise-sim, performance_model.py). Decode steps by one of two
rules:

- "tokens": the rule of that simulator. Its table of decode steps is over prompt length x batch
  size, but a sequence that decodes is looked up as one token. 60 sequences then take what the table
  extrapolates for a prompt of 60 tokens alone: a larger batch is never slower.
- "sequences": the measured steps over the number of sequences (of prompts of 512 tokens), and the
  measured slope over the context."""

import csv
import gzip
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import wire_bytes_per_token
from jdisagg.simulator.step_costs import Pace

DATA = Path(__file__).resolve().parent.parent / "data" / "splitwise_perf_model.csv.gz"
MODEL = "bloom-176b"
PROMPT = 512  # of the measurements over batch sizes
MIXED = 1.1
Rule = Literal["tokens", "sequences"]


class Line:
    """A function through points, linear between them and beyond the first and the last."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._x = np.array(sorted(points), dtype=float)
        self._y = np.array([points[x] for x in sorted(points)])

    def __call__(self, x: float) -> float:
        at = int(np.clip(np.searchsorted(self._x, x) - 1, 0, len(self._x) - 2))
        (left, right), (low, high) = self._x[at : at + 2], self._y[at : at + 2]
        return float(low + (x - left) * (high - low) / (right - left))


@cache
def measured(machine: str) -> tuple[Line, Line, Line, float]:
    """Returns the seconds of prompts over their tokens, of decode steps over prompt length x batch
    size and over batch size, and the seconds that each token of context adds."""
    prompts: dict[int, list[float]] = defaultdict(list)
    tokens: dict[int, list[float]] = defaultdict(list)
    batches: dict[int, list[float]] = defaultdict(list)
    contexts: dict[int, list[float]] = defaultdict(list)
    with gzip.open(DATA, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["model"], row["hardware"]) != (MODEL, machine):
                continue
            prompt, batch = int(row["prompt_size"]), int(row["batch_size"])
            seconds = float(row["token_time"]) / 1e3
            prompts[prompt * batch].append(float(row["prompt_time"]) / 1e3)
            tokens[prompt * batch].append(seconds)
            if prompt == PROMPT:
                batches[batch].append(seconds)
            if batch == 1:
                contexts[prompt].append(seconds)
    longest = max(contexts)
    slope = (np.median(contexts[longest]) - np.median(contexts[PROMPT])) / (longest - PROMPT)
    made = (
        Line({x: statistics.median(seconds) for x, seconds in points.items()})
        for points in (prompts, tokens, batches)
    )
    return (*made, float(slope))  # type: ignore[return-value]


class StepTable:
    """Step costs of one machine, named as in the measurements."""

    def __init__(self, machine: str, rule: Rule) -> None:
        self._prompts, self._tokens, self._batches, self._slope = measured(machine)
        self._rule = rule
        self._bytes = wire_bytes_per_token(geometry(MODEL), 2, "none")

    def prefill(self, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
        cached = sum(cached for _, cached in rows)
        whole = self._prompts(cached + sum(new for new, _ in rows))
        seconds = whole - (self._prompts(cached) if cached else 0.0)
        return seconds, seconds

    def decode(
        self, sequences: int, context_tokens: float, steps: int, longest: float = 0.0
    ) -> Pace:
        if self._rule == "tokens":
            return Pace(self._tokens(sequences))
        beyond = context_tokens - PROMPT * sequences
        return Pace(self._batches(sequences) + self._slope * beyond, self._slope * sequences)

    def host(self, sequences: int) -> float:
        return 0.0

    def mixed(
        self,
        rows: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: float,
        elsewhere: int = 0,
    ) -> float:
        cached = sum(cached for _, cached in rows)
        return MIXED * self.prefill([(sum(new for new, _ in rows) + sequences, cached)])[0]

    def insert(self, tokens: int) -> float:
        return 0.0

    def wire_bytes(self, tokens: int) -> float:
        return tokens * self._bytes
