"""Reads the measured runs of vLLM with which BLIS was validated, and predicts each run with the
cost model. Requests arrive at stated rates (benchmarks/data/README.md).

A run has several stages, one after the other (`open_loop.py`). All requests of a run have the same
lengths, and its means are over all of them. The prompts are a small set that repeats, and the
engine had a prefix cache. So all of a prompt but its last block of 16 tokens is cached. Engine,
kernels and host times are those of `public_engines.py`, which were chosen with other measurements.

`data/measured_blis.csv` has sixteen runs, four of them overloaded. In three of the overloaded runs,
clients gave up a third or more of the requests, so that the means cover only the other requests.
These runs are shown but not counted."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.open_loop import Arrivals, one_pool_at
from benchmarks.public_engines import batching, cost_model, kv_tokens
from benchmarks.public_points import Devices, Point

DATA = Path(__file__).resolve().parent / "data" / "measured_blis.csv"
RESULTS = Path(__file__).resolve().parent / "results"
WORDS = Path(__file__).resolve().parent / "blis_words.md"
BLOCK = 16  # of vLLM's prefix cache
MOST = 128  # max_num_seqs of all these runs
CAPTURED = 2 * MOST  # vLLM's largest graphs: twice that, at most 512 tokens; steps with prompts too
GROWN = 574 / 547  # prompts are longer than was asked for, by their own count
COUNTED_LOST_PERCENT = 1.0  # of a run whose means are compared


@dataclass(frozen=True, slots=True)
class Profile:
    """Stages as (requests per second, seconds), and the requested numbers of tokens."""

    stages: tuple[tuple[float, float], ...]
    prompt: int
    output: int


# inference-sim/inference-sim, testdata/trained_physics_iter29.json; "reasoning": its H31.
PROFILES = {
    "general": Profile(((8, 600), (20, 600)), 547, 248),
    "general-lite": Profile(((2.5, 600), (6, 600)), 547, 248),
    "codegen": Profile(((5, 600), (10, 600)), 566, 247),
    "roleplay": Profile(((6, 1200),), 750, 251),
    "reasoning": Profile(((4, 1200),), 1034, 1448),
    "reasoning-lite": Profile(((1, 1200),), 1034, 1448),
}
# Names of the records, and ours.
MODELS = {
    "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "01-ai/Yi-34B": "yi-34b",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
}
CARDS = {"H100": "h100", "A100-80GB": "a100", "L40S": "l40s"}


@dataclass(frozen=True, slots=True)
class Run:
    """Means over all requests of a run, in seconds. `lost_percent`: percentage of the requests that
    clients gave up."""

    model: str
    card: str
    tp: int
    profile: str
    chunk_tokens: int
    ttft: float
    whole: float
    lost_percent: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.model} {self.card} tp{self.tp} {self.profile} {self.chunk_tokens}"

    @property
    def counted(self) -> bool:
        return self.lost_percent < COUNTED_LOST_PERCENT

    @property
    def load(self) -> str:
        return "overload" if self.profile == "reasoning" and self.ttft > 10 else self.profile


@dataclass(frozen=True, slots=True)
class Foretold:
    """A measured run, and the means that the model predicts for it."""

    run: Run
    ttft: float
    whole: float

    @property
    def errors(self) -> tuple[float, float]:
        """Signed errors of TTFT and of the end-to-end time, in percent."""
        return (100 * (self.ttft / self.run.ttft - 1), 100 * (self.whole / self.run.whole - 1))


def kept_runs(path: Path = DATA) -> tuple[Run, ...]:
    """Returns the runs of the data file, in the file's order."""
    with path.open(newline="") as lines:
        return tuple(
            Run(
                row["model"],
                row["card"],
                int(row["tp"]),
                row["profile"],
                int(row["chunk_tokens"]),
                float(row["ttft_ms"]) / 1e3,
                float(row["e2e_ms"]) / 1e3,
                float(row["lost_percent"]),
            )
            for row in csv.DictReader(lines)
        )


def recorded_runs(path: Path) -> tuple[Run, ...]:
    """Returns the measured runs from BLIS's records, which have a line for each simulator, run,
    stage and metric. Skips runs of models that are not in the catalogue."""
    found: dict[str, dict[str, str]] = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row["stage_index"] == "-1":
                run = found.setdefault(row["experiment_folder"].rsplit("/", 1)[-1], dict(row))
                run[row["metric_name"]] = row["actual"]
    return tuple(_recorded(name, row) for name, row in found.items() if row["model"] in MODELS)


def _recorded(name: str, row: Mapping[str, str]) -> Run:
    profile = re.search(r"-(general|codegen|roleplay|reasoning)(-lite)?", name)
    if profile is None:
        raise ValueError(f"run {name}: no profile in its name; {', '.join(PROFILES)} are known")
    return Run(
        MODELS[row["model"]],
        CARDS[row["hardware"]],
        int(row["tp"]),
        profile[0].lstrip("-"),
        int(float(row["max_num_batched_tokens"])),
        float(row["ttft_mean"]) / 1e3,
        float(row["e2e_mean"]) / 1e3,
    )


def foretold(run: Run) -> Foretold:
    """Predicts a run, stage by stage."""
    nothing = Devices(0, 0, 0, 0)
    point = Point(
        number=0, origin="blis", engine="vllm", version="0.15.1", model=run.model, card=run.card,
        precision="bf16", mode="agg", prompt=1, output=1, users=1, batch=0, workers=1,
        devices=Devices(run.tp, 1, 0, 0), prefill_workers=0, prefill=nothing, ttft=1.0, tpot=1.0,
    )  # fmt: skip
    profile = PROFILES[run.profile]
    costs = cost_model(point, point.devices, CAPTURED)
    prompt = round(profile.prompt * GROWN)
    cached = (prompt - 1) // BLOCK * BLOCK
    steps = replace(batching(point, kv_tokens(costs), run.chunk_tokens), most=MOST)
    count = ttft = whole = 0.0
    for rate, seconds in profile.stages:
        arrivals = Arrivals(rate, seconds, prompt, profile.output, cached)
        times = one_pool_at(costs, arrivals, steps)
        count += arrivals.requests
        ttft += arrivals.requests * times.ttft
        whole += arrivals.requests * (times.ttft + (profile.output - 1) * times.tpot)
    return Foretold(run, ttft / count, whole / count)


GROUPS: dict[str, Callable[[Run], str]] = {
    "model": lambda run: run.model,
    "load": lambda run: run.load,
    "hardware": lambda run: run.card,
}


def errors(found: Sequence[Foretold]) -> dict[str, float | int]:
    """Means of the errors' sizes (MAPE), and with their signs."""
    said: dict[str, float | int] = {"runs": len(found)}
    for part, name in enumerate(("ttft", "e2e")):
        values = [item.errors[part] for item in found]
        said[f"{name}_signed"] = round(sum(values) / len(values), 1)
        said[f"{name}_mape"] = round(sum(map(abs, values)) / len(values), 1)
    return said


def tables(found: Sequence[Foretold]) -> dict[str, dict[str, dict[str, float | int]]]:
    """Returns the errors of all counted runs, and then by group."""
    counted = [item for item in found if item.run.counted]
    said = {"all": {"all": errors(counted)}}
    for group, key in GROUPS.items():
        names = dict.fromkeys(key(item.run) for item in counted)
        said[group] = {
            name: errors([item for item in counted if key(item.run) == name]) for name in names
        }
    return said


def shown(item: Foretold) -> dict[str, float]:
    """Returns a run in the form of the results file, if its figures may be published."""
    ttft, whole = item.errors
    return {
        "ttft_ms": round(1e3 * item.ttft, 1),
        "e2e_ms": round(1e3 * item.whole),
        "ttft_percent": round(ttft, 1),
        "e2e_percent": round(whole, 1),
    }


def markdown(figures: Mapping[str, object]) -> str:
    """Returns the tables of results/blis_runs.md."""
    lines: list[str] = []
    for title in ("kept", "records"):
        parts = figures.get(title)
        if not isinstance(parts, dict):
            continue
        lines.append(f"## {TITLES[title]}\n")
        for group, rows in parts.items():
            lines += [
                f"| {'' if group == 'all' else group} | runs | TTFT, signed | MAPE | end to end,"
                " signed | MAPE |",
                "|---|---|---|---|---|---|",
            ]
            for name, said in rows.items():
                cells = [str(said["runs"])]
                for part in ("ttft", "e2e"):
                    cells += [f"{said[f'{part}_signed']:+.1f} %", f"{said[f'{part}_mape']:.1f} %"]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
            lines.append("")
    runs = figures["runs"]
    assert isinstance(runs, dict)
    lines += [
        "## Run by run\n",
        "| run | TTFT, predicted | measured | error | end to end, predicted | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in kept_runs():
        said, note = runs[run.name], "" if run.counted else f" ({run.lost_percent:.0f} % lost)"
        lines.append(
            f"| {run.name}{note} | {said['ttft_ms']:,.1f} ms | {1e3 * run.ttft:,.1f} |"
            f" {said['ttft_percent']:+.0f} % | {said['e2e_ms']:,.0f} ms | {1e3 * run.whole:,.0f} |"
            f" {said['e2e_percent']:+.0f} % |"
        )
    return "\n".join(lines) + "\n"


TITLES = {
    "kept": "Runs of the first report (H30 to H32)",
    "records": "Later runs, by their records",
}


def page(figures: Mapping[str, object]) -> str:
    """Returns the whole page: text and tables."""
    return f"{WORDS.read_text()}\n{markdown(figures)}"
