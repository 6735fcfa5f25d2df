"""Measured runs of two serving systems, request by request, and the split into runs that constants
are fitted to and held-out runs (benchmarks/data/README.md).

DistServe: OPT-13B on A100, lengths of ShareGPT, Poisson arrivals. `distserve-c21d11-N-R`: N
requests at R per second, prefill with tensor parallelism 2, decode on one device. `c21d12`: decode
with two pipeline stages. `vllm-N-R`: an old vLLM on one device. Each engine is fitted to its run at
the lowest rate; higher rates and the other layout are held out. vLLM 0.19: one run on each of two
machines, fitted to its first 100 requests; the next 200 are held out. TTFT counts from the sending
of a request (DistServe), or from the scheduler's first look at it between two steps (vLLM 0.19)."""

import csv
import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jdisagg.simulator.workloads import Arrival

DATA = Path(__file__).resolve().parent / "data"

FITTED_RUNS = {"distserve": "distserve-c21d11-300-3", "vllm": "vllm-100-1"}
FITTED_REQUESTS = 100  # of each vLLM 0.19 run
TTFT_SLO, TPOT_SLO = 0.2, 0.1  # seconds: DistServe's for OPT-13B and ShareGPT


def attainment(ttft: np.ndarray, tpot: np.ndarray) -> float:
    """Returns the percentage of requests that meet both of DistServe's limits. A request with one
    token has no TPOT and meets the TPOT limit.

    Args:
        ttft: [requests] seconds.
        tpot: [requests] seconds, nan for requests with one token."""
    return 100 * float(np.mean((ttft <= TTFT_SLO) & (np.nan_to_num(tpot) <= TPOT_SLO)))


def summary(ttft: np.ndarray, tpot: np.ndarray) -> dict[str, float]:
    """Returns attainment in percent, and means and percentiles in milliseconds. The arguments are
    those of `attainment`."""
    found = {"attainment_percent": attainment(ttft, tpot)}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        found[f"{name}_mean_ms"] = 1e3 * float(np.nanmean(values))
        for percent in (50, 90, 99):
            found[f"{name}_p{percent}_ms"] = 1e3 * float(np.nanpercentile(values, percent))
    return {name: round(value, 3) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One measured run, in order of arrival. Arrays are [requests], in seconds; TPOT is nan for
    requests with one token."""

    name: str
    arrivals: tuple[Arrival, ...]
    ttft: np.ndarray
    tpot: np.ndarray
    queued: np.ndarray

    @property
    def outputs(self) -> np.ndarray:
        return np.array([item.output_tokens for item in self.arrivals])

    @property
    def prompts(self) -> np.ndarray:
        return np.array([item.prompt_tokens for item in self.arrivals])

    @property
    def at(self) -> np.ndarray:
        return np.array([item.at_seconds for item in self.arrivals])

    @property
    def first(self) -> np.ndarray:
        return self.at + self.ttft

    @property
    def finish(self) -> np.ndarray:
        return self.first + np.nan_to_num(self.tpot) * (self.outputs - 1)


def distserve_runs() -> dict[str, MeasuredRun]:
    def row(fields: Mapping[str, str]) -> tuple[int, int, float, float, float]:
        output = int(fields["output_len"])
        tpot = float(fields["tpot_ms"]) / 1e3 if output > 1 else np.nan
        return int(fields["prompt_len"]), output, float(fields["ttft_ms"]) / 1e3, tpot, 0.0

    return _read("measured_distserve_opt13b.csv.gz", row)


def vllm_runs() -> dict[str, MeasuredRun]:
    def row(fields: Mapping[str, str]) -> tuple[int, int, float, float, float]:
        output = int(fields["output_toks"])
        first, last = (
            float(fields["first_token_after_queue_ms"]) / 1e3,
            float(fields["last_token_after_queue_ms"]) / 1e3,
        )
        tpot = (last - first) / (output - 1) if output > 1 else np.nan
        return (
            int(fields["input_toks"]),
            output,
            first,
            tpot,
            float(fields["scheduled_after_queue_ms"]) / 1e3,
        )

    return _read("measured_vllm.csv.gz", row)


def _read(
    name: str, row: Callable[[Mapping[str, str]], tuple[int, int, float, float, float]]
) -> dict[str, MeasuredRun]:
    rows: dict[str, list[tuple[Arrival, float, float, float]]] = {}
    with gzip.open(DATA / name, "rt", newline="") as lines:
        for fields in csv.DictReader(lines):
            prompt, output, ttft, tpot, queued = row(fields)
            rows.setdefault(fields["run"], []).append(
                (Arrival(float(fields["arrival_s"]), prompt, output), ttft, tpot, queued)
            )
    runs = {}
    for run, found in rows.items():
        found.sort(key=lambda entry: entry[0].at_seconds)
        ttft, tpot, queued = (
            np.array([entry[index] for entry in found], float) for index in (1, 2, 3)
        )
        runs[run] = MeasuredRun(run, tuple(entry[0] for entry in found), ttft, tpot, queued)
    return runs
