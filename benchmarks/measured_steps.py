"""Reads the measured steps of `data/splitwise_perf_model.csv.gz` as observations a cost model can
be fitted to or held against."""

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

DATA = Path(__file__).resolve().parent / "data" / "splitwise_perf_model.csv.gz"
MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
MACHINES = {"a100-80gb": "a100", "h100-80gb": "h100", "h100-80gb-pcap": "h100"}

# These runs' all-reduces change their speed between messages of 32 and of 64 MiB (Llama2-70B: 2048
# and 4096 tokens of 16 KiB).
LARGE_BYTES = float(1 << 26)


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one model on one machine: every row of the file, as it is."""

    prefill: tuple[Observation, ...]
    decode: tuple[Observation, ...]

    @property
    def cells(self) -> "Steps":
        """Each setting once, with the median of its repetitions: what fits are made of, so that
        settings repeated more count no more."""
        return Steps(_medians(self.prefill), _medians(self.decode))

    @property
    def all(self) -> tuple[Observation, ...]:
        return self.prefill + self.decode


def measured_steps(path: Path = DATA) -> dict[tuple[str, str], Steps]:
    """(model, machine) -> its steps. A decode step's context is the prompt and half of what was
    generated."""
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
    """Where a fit of these runs starts: the published fractions. Their engine issues every
    operation from Python: what it costs is a floor a layer and not a time a step."""
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
