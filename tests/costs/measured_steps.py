"""Reads the measured steps of `benchmarks/data/splitwise_perf_model.csv.gz` as observations."""

import csv
import gzip
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jdisagg.costs.catalog import geometry
from jdisagg.costs.fitting import Observation
from jdisagg.costs.hardware import Accelerator, accelerator
from jdisagg.layout.axes import Layout

DATA = Path(__file__).resolve().parents[2] / "benchmarks/data/splitwise_perf_model.csv.gz"
MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
MACHINES = {"a100-80gb": "a100", "h100-80gb": "h100", "h100-80gb-pcap": "h100"}

# These runs' all-reduces change their speed between messages of 32 and of 64 MiB (Llama2-70B: 2048
# and 4096 tokens of 16 KiB).
LARGE_BYTES = float(1 << 26)


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps of one model on one machine: every row of the file."""

    prefill: tuple[Observation, ...]
    decode: tuple[Observation, ...]

    @property
    def cells(self) -> "Steps":
        """Returns each setting once, with the median of its repetitions. Fits use these, so that
        repeated settings do not count more."""
        return Steps(_medians(self.prefill), _medians(self.decode))

    @property
    def all(self) -> tuple[Observation, ...]:
        return self.prefill + self.decode


def measured_steps(path: Path = DATA) -> dict[tuple[str, str], Steps]:
    """Returns the steps by (model, machine). The context of a decode step is the prompt and half of
    the generated tokens."""
    prefill: defaultdict[tuple[str, str], list[Observation]] = defaultdict(list)
    decode: defaultdict[tuple[str, str], list[Observation]] = defaultdict(list)
    with gzip.open(path, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            key = (MODELS[row["model"]], row["hardware"])
            prompt, batch, generated = (
                int(row[name]) for name in ("prompt_size", "batch_size", "token_size")
            )
            layout, shape = Layout(tp=int(row["tensor_parallel"])), geometry(key[0])
            prefill[key].append(
                Observation(
                    shape,
                    layout,
                    "prefill",
                    ((prompt, 0),) * batch,
                    float(row["prompt_time"]) / 1e3,
                )
            )
            decode[key].append(
                Observation(
                    shape,
                    layout,
                    "decode",
                    ((batch, prompt + generated // 2),),
                    float(row["token_time"]) / 1e3,
                )
            )
    return {key: Steps(tuple(prefill[key]), tuple(decode[key])) for key in prefill}


def eager_accelerator(machine: str) -> Accelerator:
    """Returns the start of a fit of these runs: the published fractions. The measured engine issues
    every operation from Python, so its host time is a minimum per layer rather than a time per
    step."""
    known = accelerator(MACHINES[machine])
    start = replace(
        known.efficiency,
        step_seconds=0.0,
        prefill_seconds=0.0,
        sequence_seconds=1e-4,
        collective_seconds=2e-5,
        large_bytes=LARGE_BYTES,
    )
    return replace(known, efficiency=start)


def _medians(steps: Sequence[Observation]) -> tuple[Observation, ...]:
    found: defaultdict[Observation, list[float]] = defaultdict(list)
    for seen in steps:
        found[replace(seen, seconds=1.0)].append(seen.seconds)
    return tuple(
        replace(seen, seconds=statistics.median(seconds)) for seen, seconds in found.items()
    )
