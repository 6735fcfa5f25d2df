"""Writes `benchmarks/STATUS.md`: the latest figure of each metric beside its goal, from `results/`.

    python -m benchmarks.status

Each row of `METRICS` is one row of the page. Run this script after every new benchmark result:
`tests/docs/test_status.py` compares the committed page with its output."""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.servers import KINDS

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parent / "STATUS.md"


class Metric(NamedTuple):
    """Where a figure is in the results. `path` leads through the keys of `results/<results>.json`,
    by patterns that "|" separates; -1 is the last entry of a list. A `goal` bounds every value that
    the path selects. With `minus`, a second path, the values are differences. If a value is
    missing, the page states that it was not measured."""

    name: str
    goal: str
    unit: str
    results: str
    path: str
    minus: str = ""


def page(results: Path = RESULTS) -> str:
    """Returns the text of STATUS.md for the results in `results`."""
    lines = [_HEAD]
    for subject, metrics in METRICS.items():
        lines += [f"\n## {subject}\n", "| metric | goal | latest | met | from |"]
        lines += ["|---|---|---|---|---|", *(_row(metric, results) for metric in metrics)]
    lines += [
        "\n## Where the figures come from\n",
        "| results | script | date | commit | machine |",
    ]
    lines += ["|---|---|---|---|---|"]
    lines += [_source(name, script, results) for name, script in SCRIPTS.items()]
    return "\n".join(lines) + "\n"


def _row(metric: Metric, results: Path) -> str:
    unit = f" {metric.unit}" if metric.unit else ""
    goal = f"{metric.goal}{unit}" if metric.goal else "-"
    figures = _read(results, metric.results)
    values = [*_values(figures, metric.path.split("|"))]
    if not values:
        return f"| {metric.name} | {goal} | not measured | - | {metric.results} |"
    if metric.minus:
        limits = _values(figures, metric.minus.split("|"))
        values = [value - limit for value, limit in zip(values, limits, strict=True)]
    least, most = _digits(min(values)), _digits(max(values))
    latest = least if least == most else f"{least} to {most}"
    met = "-"
    if metric.goal:
        kind, bound = metric.goal.rsplit(" ", 1)
        # Compared as printed: the page must not call 0.9 missed that is 0.8996.
        shown = [float(_digits(value)) for value in values]
        count = sum(v >= float(bound) if kind == "at least" else v <= float(bound) for v in shown)
        met = "yes" if count == len(values) else "no" if not count else f"{count} of {len(values)}"
    return f"| {metric.name} | {goal} | {latest}{unit} | {met} | {metric.results} |"


def _values(node: object, steps: list[str]) -> Iterator[float]:
    if not steps:
        assert isinstance(node, int | float), node
        yield float(node)
    elif isinstance(node, list):
        for child in [node[-1]] if steps[0] == "-1" else node:
            yield from _values(child, steps[1:])
    elif isinstance(node, dict):
        for key, child in node.items():
            if fnmatchcase(key, steps[0]):
                yield from _values(child, steps[1:])


def _source(name: str, script: str, results: Path) -> str:
    figures = _read(results, name)
    if figures is None:
        return f"| {name} | `{script}` | not measured | - | - |"
    made = {**figures.get("machine", {}), **figures.get("made", {})}
    if name == "chaos":  # its runs are of several commits; the page shows the last one
        last = figures["random, ten minutes, seed 1"][-1]
        made = {**made, "commit": last["commit"], "load_average": last["load_average"], "date": ""}
    peer = figures.get("peer", {}).get("versions", {})
    words = []
    if not peer:  # else there is no room: the file has it
        words += [made.get("processor", "").replace("(R)", "").replace(" Processor", "")]
        words += [made["vectors"]] if "vectors" in made else []
        words += [f"{made['cores']} cores"] if "cores" in made else []
        words += [f"load {made['load_average']}"] if "load_average" in made else []
    words += [f"JAX {made['jax']}"] if "jax" in made else []
    words += [" ".join(item) for item in peer.items() if item[0] not in ("python", "torch")]
    date, commit = made.get("date") or "not recorded", made.get("commit", "not recorded")
    machine = ", ".join(word for word in words if word) or "not recorded"
    return f"| [{name}](results/{name}.json) | `{script}` | {date} | {commit} | {machine} |"


def _digits(value: float) -> str:
    return f"{value:,.0f}".replace(",", "") if abs(value) >= 100 else f"{value:.3g}"


def _read(results: Path, name: str) -> dict | None:
    file = results / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _throughput(dtype: str, batch_32: float) -> list[Metric]:
    results = f"throughput_{dtype}"
    return [
        Metric(f"prefill 512 and 2048, {dtype}", "at least 0.95", "", results, "prefill*|speed"),
        Metric(f"decode B=1, {dtype}", "at least 0.95", "", results, "decode B=1|speed"),
        Metric(f"decode B=8, {dtype}", "at least 0.85", "", results, "decode B=8|speed"),
        Metric(f"decode B=32, {dtype}", f"at least {batch_32}", "", results, "decode B=32|speed"),
        Metric(f"32 x (512 in, 64 out), {dtype}", "at least 0.952", "", results, "offline*|speed"),
    ]


def _peer(dtype: str) -> list[Metric]:
    """Returns rows without goals, because goals are stated relative to the plain loop."""
    parts = [*(f"prefill {n}" for n in (512, 2048)), *(f"decode B={n}" for n in (1, 8, 32))]
    paths = {part: part for part in parts} | {"32 x (512 in, 64 out)": "offline*"}
    return [
        Metric(f"{name}, {dtype}", "", "", f"vllm_{dtype}", f"{path}|speed")
        for name, path in paths.items()
    ]


def _beside(server: str) -> list[Metric]:
    rates, storm = f"poisson|rate [0-9]*|{server}|", f"storm|{server}|"
    rows = [
        ("all at once", "tokens/s", f"poisson|rate inf|{server}|tokens_per_second"),
        ("TTFT p99, by rates", "ms", f"{rates}ttft_p99_ms"),
        ("TBT p50, by rates", "ms", f"{rates}tbt_p50_ms"),
        ("TBT p99, by rates", "ms", f"{rates}tbt_p99_ms"),
        ("TBT p99 in a storm of prompts", "ms", f"{storm}storm|tbt_p99_ms"),
        ("that, of its idle TBT p99", "", f"{storm}p99_of_idle"),
    ]
    files = {"poisson": "side_by_side_float32", "storm": "storm_float32"}
    return [
        Metric(f"{server}: {name}", "", unit, files[path.partition("|")[0]], path)
        for name, unit, path in rows
    ]


def _handoff(size: str) -> list[Metric]:
    pulled, inserted = f"*{size}|pulled ahead|of bare", f"*{size}|inserted ahead|of bare"
    hidden = f"*{size}|exposed|16 groups|hidden"
    return [
        Metric(f"{size}: pulled", "at least 0.9", "", "handoff", pulled),
        Metric(f"{size}: inserted, verified", "at least 0.6", "", "handoff", inserted),
        Metric(f"{size}: hidden by prefill, 16 groups", "at least 0.85", "", "handoff", hidden),
    ]


_CHAOS = "random, ten minutes, seed 1|-1|total|"
_HELD_OUT = "*fitted to llama-2-70b|held_out|"
_RMSE = "attainment_rmse_points|"
_BLIS = "records|all|all"
_HALF = "errors|all|other half"
_LARGE = "1,000 instances, 100,000 requests|"

METRICS = {
    "The engine against a plain loop (its seconds / ours)": [
        *_throughput("float32", 0.82),
        *_throughput("bfloat16", 0.78),
    ],
    "The engine against vLLM for CPUs, the same model, tokens and cores (its seconds / ours)": [
        *_peer("float32"),
        *_peer("bfloat16"),
    ],
    "Servers side by side on two cores, one client (disaggregated: a core each role), float32": [
        metric for server in KINDS for metric in _beside(server)
    ],
    "Sampling and the service": [
        Metric(
            "sampled / greedy decode", "at least 0.9", "", "sampled_grpc_float32", "sampled*|speed"
        ),
        Metric("over gRPC / direct", "at least 0.95", "", "sampled_grpc_float32", "gRPC|speed"),
        Metric(
            "HTTP, 512 streams, a token a frame; a core",
            "at least 100000",
            "tokens/s",
            "http_door",
            "span 1|http|tokens_per_second_a_core",
        ),
        Metric(
            "HTTP, 512 streams, 16 tokens a frame; a core",
            "at least 100000",
            "tokens/s",
            "http_door",
            "span 16|http|tokens_per_second_a_core",
        ),
        Metric(
            "gRPC, 512 streams, a token a message; a core",
            "",
            "tokens/s",
            "http_door",
            "span 1|grpc|tokens_per_second_a_core",
        ),
    ],
    "The hand-off between two processes, six layout pairs (of the bare engine's rate)": [
        *_handoff("16 MB"),
        *_handoff("64 MB"),
    ],
    "Low load: two processes against one; 32, 200, 400 tokens": [
        Metric(
            "TTFT beyond its limit",
            "at most 0",
            "ms",
            "low_load",
            "* tokens|disaggregated ttft|median_ms",
            "* tokens|ttft limit ms",
        ),
        Metric(
            "gap to the second token beyond its limit",
            "at most 0",
            "ms",
            "low_load",
            "* tokens|disaggregated gap|median_ms",
            "* tokens|gap limit ms",
        ),
    ],
    "Codecs (bytes on the wire, of bfloat16)": [
        Metric(codec, "", "", "codecs", f"*bfloat16|{codec}|of_none")
        for codec in ("int8", "int4", "fp8")
    ],
    "Faults: `benchmarks.soak`, ten minutes at random": [
        Metric("streams interrupted", "", "", "chaos", _CHAOS + "streams_interrupted"),
        Metric("scenarios that went wrong", "at most 0", "", "chaos", _CHAOS + "wrong"),
        Metric(
            "until all pages are free, longest", "at most 10", "s", "chaos", _CHAOS + "quiet_m*"
        ),
        Metric("pause of a stream, median", "", "s", "chaos", _CHAOS + "pause_median_s"),
    ],
    "Router": [
        Metric(
            "a decision among 1,000 instances, p99",
            "at most 0.001",
            "s",
            "placement",
            "instances|1000|decision_p99_seconds",
        ),
        Metric(
            "hit rates of blocks, beyond those published",
            "at most 0.1",
            "points",
            "prefix_hits",
            "[cs]*|*|plain_lru",
            "[cs]*|*|published",
        ),
    ],
    "Roles that change": [
        Metric("first time in a role", "", "s", "role_switch", "median_seconds_to_become|first|*"),
        Metric("a role held before", "", "s", "role_switch", "median_seconds_to_become|later|*"),
        Metric("the controller decides after", "", "s", "elastic_live", "long_*|decided_after*"),
        Metric("longest pause meanwhile", "", "s", "elastic_live", "long_*|longest_pause_seconds"),
    ],
    "Conversations of eight turns: TTFT of later turns, caches off / defaults": [
        Metric(name, f"at least {goal}", "", f"conversations_{model}", f"{model}|ttft ratio")
        for model, name, goal in (
            ("measured", "full attention", 8),
            ("hybrid", "three of four layers with state", 4),
        )
    ],
    "Cost model, BLOOM-176B held out (median error)": [
        Metric(phase, goal, "%", "cost_model", f"{_HELD_OUT}{phase}|rows|median_percent")
        for phase, goal in (("prefill", "at most 8"), ("decode", "at most 12"))
    ],
    "Simulator against measured runs, held out (attainment, RMSE)": [
        Metric("DistServe c21d11", "at most 4", "points", "fidelity", f"{_RMSE}*c21d11|ours"),
        Metric("DistServe c21d12", "", "points", "fidelity", f"{_RMSE}distserve-c21d12|ours"),
        Metric(
            "DistServe c21d12, live turns",
            "at most 8",
            "points",
            "fidelity",
            f"{_RMSE}live turns*|ours",
        ),
        Metric("vLLM", "at most 6.3", "points", "fidelity", f"{_RMSE}vllm-|ours"),
    ],
    "Cost model against public measurements, nothing fitted, the half not looked at while tuning": [
        Metric("TPOT, median error", "at most 10", "%", "public_runs", f"{_HALF}|tpot_median"),
        Metric("TPOT, p90", "at most 35", "%", "public_runs", f"{_HALF}|tpot_p90"),
        Metric("TTFT, median error", "at most 25", "%", "public_runs", f"{_HALF}|ttft_median"),
        Metric(
            "points asked for, of models in the catalogue",
            "at least 90",
            "%",
            "public_runs",
            "coverage|of_models*",
        ),
        Metric(
            "of those whose deployment is stated",
            "at least 90",
            "%",
            "public_runs",
            "coverage|of_those*",
        ),
    ],
    "Cost model against BLIS's runs, nothing fitted": [
        Metric("TTFT, mean error", "at most 15", "%", "blis_runs", f"{_BLIS}|ttft_mape"),
        Metric("end to end, mean error", "at most 10", "%", "blis_runs", f"{_BLIS}|e2e_mape"),
    ],
    "Messages between processes, against protocol buffers (times as fast)": [
        Metric("encode and decode", "at least 5", "", "messages", "messages|*|times_as_fast")
    ],
    "Speed of the simulator, one core": [
        Metric(
            "8,502 requests on 40 instances, requests per second",
            "at least 2000",
            "",
            "simulator_speed",
            "trace, 40 instances|requests_per_second",
        ),
        Metric(
            "100,000 requests on 1,000", "at most 300", "s", "simulator_speed", _LARGE + "wall*"
        ),
        Metric("peak memory of that", "at most 4000", "MB", "simulator_speed", _LARGE + "peak*"),
        Metric("a plan, sites measured so far", "at most 60", "s", "plans", "*|processor_seconds"),
        Metric("a plan of gpt-oss-120b", "at most 60", "s", "plans_moe", "*|processor_seconds"),
    ],
    "A decode step of 32 sequences, compiled for TPUs without one, two layers": [
        Metric(
            "memory traffic over weights", "at most 1.5", "", "tpu_programs", "decode|*|traffic*"
        ),
        Metric(
            "XLA's estimate over weights", "at most 1.5", "", "tpu_programs", "decode|*|estimate*"
        ),
        Metric("bytes beside the arguments", "at most 64", "MB", "tpu_programs", "decode|*|temp*"),
        Metric("largest copy", "at most 16", "MB", "tpu_programs", "decode|*|largest*"),
    ],
}

SCRIPTS = {
    "throughput_float32": "benchmarks.throughput",
    "throughput_bfloat16": "benchmarks.throughput",
    "vllm_float32": "benchmarks.throughput --peer=vllm",
    "vllm_bfloat16": "benchmarks.throughput --peer=vllm",
    "side_by_side_float32": "benchmarks.side_by_side",
    "storm_float32": "benchmarks.side_by_side",
    "sampled_grpc_float32": "benchmarks.throughput",
    "http_door": "benchmarks.http_door",
    "handoff": "benchmarks.handoff",
    "low_load": "benchmarks.low_load",
    "codecs": "benchmarks.codecs",
    "chaos": "benchmarks.soak",
    "messages": "benchmarks.messages",
    "followers": "benchmarks.followers",
    "placement": "benchmarks.placement",
    "prefix_hits": "benchmarks.prefix_hits",
    "role_switch": "benchmarks.role_switch",
    "elastic_live": "benchmarks.elastic_live",
    "conversations_measured": "benchmarks.conversations",
    "conversations_hybrid": "benchmarks.conversations",
    "cost_model": "benchmarks.cost_model",
    "fidelity": "benchmarks.fidelity",
    "public_runs": "benchmarks.public_runs",
    "blis_runs": "benchmarks.blis_runs",
    "simulator_speed": "benchmarks.simulator_speed",
    "plans": "benchmarks.plans",
    "plans_moe": "benchmarks.plans",
    "stages": "benchmarks.stages",
    "tpu_programs": "benchmarks.tpu_programs",
}

_HEAD = """\
# Where the figures stand

The latest figure of each metric, generated from `results/*.json` by `python -m benchmarks.status`.
What explains them, and what was tried without gain, is in [LOG.md](LOG.md); goodput of
disaggregated, chunked and unified serving is in [results/study.md](results/study.md). A range spans
the cases of a metric, "met" counts them. All on CPUs of two cores, processes over loopback: nothing
was measured on a GPU or between hosts."""


if __name__ == "__main__":
    PAGE.write_text(page())
