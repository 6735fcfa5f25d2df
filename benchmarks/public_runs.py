"""How near does the cost model come to published measurements of other engines, without fitting to
them?

    python -m benchmarks.public_runs --name=public_runs [--only=model,card,engine] [--worst=20]

Predicts every measured point of `public_points.py` that the model supports: its closed loop of
users (`closed_loop.py`), on the accelerator of the hardware table, with the engine's batching. An
error is predicted / measured - 1. Reports the median and the 90th percentile of the magnitudes and
the median of the signed errors, by model, hardware, engine, precision and batch. The half with
which mechanisms were adjusted and the held-out half are reported separately."""

import datetime
import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from absl import app, flags

from benchmarks.closed_loop import Load, Times, one_pool, two_pools
from benchmarks.commits import commit
from benchmarks.public_engines import batching, cold_seconds, cost_model, kv_tokens, setting
from benchmarks.public_points import Point, public_points

_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
_ONLY = flags.DEFINE_list("only", [], "Points alone whose engine, model or card is named.")
_WORST = flags.DEFINE_integer("worst", 0, "Print so many of the largest errors looked at.")

RESULTS = Path(__file__).resolve().parent / "results"
WORDS = Path(__file__).resolve().parent / "public_words.md"
NO_ROOM = "its weights have no room on the devices that it states"
SAMPLED = 40  # every so many points are kept with their figures
INFERENCEX_SHORTEST = 0.8  # its --random-range-ratio
BATCHES = (1, 8, 32, 128, 512)  # lower ends of the table's groups


@dataclass(frozen=True, slots=True)
class Predicted:
    """One point and the model's prediction."""

    point: Point
    times: Times

    @property
    def ttft_error(self) -> float:
        return self.times.ttft / self.point.ttft - 1

    @property
    def tpot_error(self) -> float:
        return self.times.tpot / self.point.tpot - 1


def predict(point: Point) -> Predicted:
    """Predicts a point that is not refused."""
    costs = cost_model(point, point.devices)
    users, dp = point.users, max(1, point.devices.dp)
    shortest = INFERENCEX_SHORTEST if point.origin == "inferencex" else 1.0
    load = Load(users, point.prompt, point.output, shortest)
    said = setting(point)
    steps = batching(point, kv_tokens(costs), said.chunk_tokens, poll=said.poll)
    if point.mode == "agg":
        per_rank = replace(load, users=max(1, round(users / dp)))
        if point.engine == "sglang":  # whose ranks share a chunk
            steps = replace(steps, chunk_tokens=said.chunk_tokens // dp)
        return _warmed(point, one_pool(costs, per_rank, steps), load)
    servers = point.prefill_workers * max(1, point.prefill.dp)
    prefill = cost_model(point, point.prefill)
    times = two_pools(prefill, costs, load, steps, servers, point.workers * dp)
    return _warmed(point, times, load)


def _warmed(point: Point, times: Times, load: Load) -> Predicted:
    return Predicted(point, replace(times, ttft=times.ttft + cold_seconds(point) / load.rounds))


def refusal(point: Point) -> str:
    """Returns the point's own refusal, or a text if its weights do not fit on the stated
    devices."""
    if point.refusal:
        return point.refusal
    return "" if kv_tokens(cost_model(point, point.devices)) else NO_ROOM


def errors(found: Sequence[Predicted]) -> dict[str, float | int]:
    """Returns the errors in percent."""
    said: dict[str, float | int] = {"points": len(found)}
    for name in ("tpot", "ttft"):
        values = sorted(100 * getattr(item, f"{name}_error") for item in found)
        sizes = sorted(abs(value) for value in values)
        said[f"{name}_signed"] = round(statistics.median(values), 1)
        said[f"{name}_median"] = round(statistics.median(sizes), 1)
        said[f"{name}_p90"] = round(sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], 1)
    return said


def shown(item: Predicted) -> list[float]:
    """Returns TTFT and TPOT in ms, in the form of the results file."""
    return [float(f"{1e3 * seconds:.5g}") for seconds in (item.times.ttft, item.times.tpot)]


def batch_group(point: Point) -> str:
    """Returns the point's group by number of sequences per dp rank."""
    batch = point.users / max(1, point.devices.dp) / point.workers
    low = max(edge for edge in BATCHES if edge <= max(1, batch))
    above = [edge for edge in BATCHES if edge > low]
    return f"{low} to {above[0] - 1}" if above else f"{low} and more"


GROUPS: dict[str, Callable[[Point], str]] = {
    "pools": lambda point: {"agg": "one pool", "disagg": "two pools"}[point.mode],
    "model": lambda point: point.model,
    "hardware": lambda point: point.card,
    "engine": lambda point: point.engine,
    "precision": lambda point: point.precision,
    "sequences a rank": batch_group,
    "prompt": lambda point: str(point.prompt),
    "origin": lambda point: point.origin,
}


def tables(found: Sequence[Predicted]) -> dict[str, dict[str, dict[str, float | int]]]:
    """Returns the errors of both halves, and then of all points by group."""
    halves = {
        "all": found,
        "looked at": [item for item in found if item.point.looked_at],
        "other half": [item for item in found if not item.point.looked_at],
    }
    said = {"all": {name: errors(part) for name, part in halves.items() if part}}
    for group, key in GROUPS.items():
        names = sorted({key(item.point) for item in found}, key=lambda name: (len(name), name))
        said[group] = {
            name: errors([item for item in found if key(item.point) == name]) for name in names
        }
    return said


def coverage(points: Sequence[Point]) -> dict[str, object]:
    """Returns how many points can be predicted, and the reasons for the others."""
    why = [refusal(point) for point in points]
    known = [reason for reason in why if "catalogue" not in reason]
    stated = [reason for reason in known if not reason.startswith("its ")]
    reasons, expressed = Counter(filter(None, why)), why.count("")
    return {
        "points": len(points),
        "expressed": expressed,
        "of_models_in_the_catalogue_percent": round(100 * expressed / len(known), 1),
        "of_those_whose_deployment_is_stated_percent": round(100 * expressed / len(stated), 1),
        "refused": dict(reasons.most_common()),
    }


def markdown(figures: dict[str, object]) -> str:
    """Returns the tables of results/public_runs.md, without the text."""
    errors_of, covered = figures["errors"], figures["coverage"]
    assert isinstance(errors_of, dict) and isinstance(covered, dict)
    lines = []
    for group, rows in errors_of.items():
        lines += [
            f"\n### By {group}\n" if group != "all" else "",
            "| | points | TPOT, signed | median | p90 | TTFT, signed | median | p90 |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, said in rows.items():
            cells = [str(said["points"])]
            for part in ("tpot", "ttft"):
                cells += [f"{said[f'{part}_signed']:+.0f} %"]
                cells += [f"{said[f'{part}_{which}']:.0f} %" for which in ("median", "p90")]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["\n### What is not asked for\n", "| reason | points |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in covered["refused"].items()]
    return "\n".join(lines).strip() + "\n"


def page(figures: dict[str, object]) -> str:
    """Returns the whole page: text and tables."""
    return f"{WORDS.read_text()}\n## Tables\n\n{markdown(figures)}"


def main(argv: list[str]) -> None:
    del argv
    points = public_points()
    asked = [point for point in points if not refusal(point)]
    if _ONLY.value:
        wanted = set(_ONLY.value)
        asked = [point for point in asked if wanted & {point.model, point.card, point.engine}]
    found = [predict(point) for point in asked]
    figures: dict[str, object] = {
        "made": {"date": datetime.date.today().isoformat(), "commit": commit()},
        "coverage": coverage(points),
        "errors": tables(found),
    }
    print(markdown(figures))
    worst = sorted(
        (item for item in found if item.point.looked_at),
        key=lambda item: -max(abs(item.tpot_error), abs(item.ttft_error) / 3),
    )
    for item in worst[: _WORST.value]:
        print(f"{100 * item.tpot_error:+.0f} {100 * item.ttft_error:+.0f} {item.point}")
    if not _NAME.value:
        return
    # By these a test sees that the table is what the code gives.
    figures["sample"] = {str(item.point.number): shown(item) for item in found[::SAMPLED]}
    (RESULTS / f"{_NAME.value}.json").write_text(json.dumps(figures, indent=1) + "\n")
    (RESULTS / f"{_NAME.value}.md").write_text(page(figures))


if __name__ == "__main__":
    app.run(main)
