"""Writes `benchmarks/STATUS.md`: the latest saved figure of each metric beside its goal, from
`results/`.

    python -m benchmarks.status

Each row of the page is a row of `status_rows.json`: name, goal, unit, file of `results/`, path to
the figure, and sometimes a second path whose figures are subtracted. A path leads through the keys
of the file by patterns that "|" separates; in a list, by the name in `row`, and -1 is the last
entry. A goal bounds every value that the path selects. `sources` are the scripts of the files, and
where in a file the commit and the machine are, if not in `machine` or `made`. Run this script after
every new result: `tests/docs/test_status.py` compares the committed page with its output."""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE / "STATUS.md"
ROWS = json.loads((HERE / "status_rows.json").read_text())


class Metric(NamedTuple):
    name: str
    goal: str
    unit: str
    results: str
    path: str
    minus: str = ""


def page(results: Path = RESULTS) -> str:
    """Returns the text of STATUS.md for the results in `results`."""
    lines = [_HEAD]
    for subject, metrics in ROWS["subjects"].items():
        lines += [f"\n## {subject}\n", "| metric | goal | latest | met | from |"]
        lines += ["|---|---|---|---|---|", *(_row(Metric(*metric), results) for metric in metrics)]
    lines += [
        "\n## Where the figures come from\n",
        "| results | script | date | commit | machine |",
    ]
    lines += ["|---|---|---|---|---|"]
    lines += [_source(name, *source, results=results) for name, source in ROWS["sources"].items()]
    return "\n".join(lines) + "\n"


def _row(metric: Metric, results: Path) -> str:
    unit = f" {metric.unit}" if metric.unit else ""
    goal = f"{metric.goal}{unit}" if metric.goal else "-"
    figures = _read(results, metric.results)
    values = [*_numbers(figures, metric.path)]
    if not values:
        return f"| {metric.name} | {goal} | not measured | - | {metric.results} |"
    if metric.minus:
        limits = _numbers(figures, metric.minus)
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


def _numbers(figures: object, path: str) -> Iterator[float]:
    for value in _at(figures, path.split("|")):
        assert isinstance(value, int | float), value
        yield float(value)


def _at(node: object, steps: list[str]) -> Iterator[object]:
    if not steps:
        yield node
    elif isinstance(node, list):
        for child in [node[-1]] if steps[0] == "-1" else node:
            name = child.get("row", "") if isinstance(child, dict) else ""
            if steps[0] == "-1" or fnmatchcase(name, steps[0]):
                yield from _at(child, steps[1:])
    elif isinstance(node, dict):
        for key, child in node.items():
            if fnmatchcase(key, steps[0]):
                yield from _at(child, steps[1:])


def _source(name: str, script: str, record: str = "", *, results: Path) -> str:
    figures = _read(results, name)
    if figures is None:
        return f"| {name} | `{script}` | not measured | - | - |"
    made = {**figures.get("machine", {}), **figures.get("made", {})}
    if record:  # the file has runs of several commits; the page shows this one
        (run,) = _at(figures, record.split("|"))
        assert isinstance(run, dict)
        made = {**made, "date": "", **run}
    peer = figures.get("peer", {}).get("versions", {})
    words = []
    if not peer:  # else there is no room: the file has it
        processor = made.get("device", made.get("processor", made.get("machine", "")))
        words += [processor.replace("(R)", "").replace(" Processor", "")]
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


_HEAD = """\
# Where the figures stand

The latest saved figure of each metric, generated from `results/*.json` by `python -m
benchmarks.status`. Each is of the commit in the table at the end: nothing is measured anew when the
code changes. What explains them, later figures that were not saved, and what was tried without gain
are in [LOG.md](LOG.md); goodput of disaggregated, chunked and unified serving is in
[results/study.md](results/study.md). A range spans the cases of a metric, "met" counts them.

Measured on CPUs of two cores, processes over loopback, but for two sections. On one H100, kernels,
decode steps and prefill chunks were measured; `jdisagg serve` did not start there within 167 s, so
that no request was served on a GPU. For TPUs programs were compiled and never run. Nothing was
measured between hosts."""


if __name__ == "__main__":
    PAGE.write_text(page())
