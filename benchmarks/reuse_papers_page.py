"""Writes the page of `reuse_papers.py`, with one table per case, from the JSON results alone."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from absl import app

from benchmarks.commits import RESULTS

Figures = Mapping[str, Any]
NAME = "reuse_papers"
# what each case's runs are held against, run and where there are several its rates alike
AGAINST = {"ppd": "forgetful", "dualpath": "storage", "agentic": "one pool"}
TITLES = {"ppd": "PPD", "dualpath": "DualPath", "agentic": "agentic-kvc"}
HEAD = (
    "run", "rate", "TTFT p50, p90", "x", "later turns p50, p90", "x", "second token p50",
    "TPOT p50, p90 (ms)", "x", "found", "appended", "fetched", "restored", "busy P, D", "link",
)  # fmt: skip
EXPLAINED = """
Written by `python -m benchmarks.reuse_papers --name=reuse_papers`; what it means is in
[the log](../LOG.md). Seconds, where nothing else is said. `x`: the median before it against the
case's first run at the same rate. Second token: when it comes after the request, which is the first
token of systems whose decode worker gives it. Found: part of the prompts' tokens that no prefill
computed. Appended: requests. Fetched, restored: tokens, in thousands. Busy: part of the time, of
prefill and decode workers (one pool: of all). Link: the same of the prefill workers' link from
storage."""


def page(figures: Figures) -> str:
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Figures) -> Iterator[str]:
    yield "# Three papers about KV that is found again, simulated"
    yield ""
    yield from _folded(EXPLAINED)
    for name, case in figures["cases"].items():
        yield from ("", f"## {TITLES[name]}", "", *_folded(case["claim"]), "")
        yield from (*_folded("Simulated: " + case["setting"]), "")
        for run, said in case["runs"].items():
            yield f"- {run}: {said['differs']}"
        yield from ("", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD))
        known = case["runs"][AGAINST[name]]["points"]
        for run, said in case["runs"].items():
            for point in said["points"]:
                base = next((one for one in known if one["rate"] == point["rate"]), None)
                yield _row(run, point, base)
        if case["limit"] is not None:
            yield ""
            yield f"Requests a second with a TTFT of {case['limit']:g} s at the most at p90:"
            for run, said in case["runs"].items():
                yield f"- {run}: {_kept(said['points'], case['limit'])}"
        made = case["machine"]
        yield ""
        yield f"Made {made['date']} at {made['commit']}, Python {made['python']}."


def _row(run: str, point: Figures, base: Figures | None) -> str:
    def pair(name: str, scale: float = 1.0) -> str:
        values = [point[name][which] for which in ("p50", "p90")]
        return ", ".join("-" if one is None else f"{one * scale:.3g}" for one in values)

    def ratio(name: str) -> str:
        ours = point[name]["p50"]
        return f"{ours / base[name]['p50']:.2f}" if base and ours and base[name]["p50"] else "-"

    busy = ", ".join(f"{point['busy'][role]:.2f}" for role in sorted(point["busy"], reverse=True))
    cells = (
        run, f"{point['rate']:g}", pair("ttft_seconds"), ratio("ttft_seconds"),
        pair("later_turn_ttft_seconds"), ratio("later_turn_ttft_seconds"),
        f"{point['second_token_seconds']['p50']:.3g}", pair("tpot_seconds", 1e3),
        ratio("tpot_seconds"), f"{point['cached']:.3f}", str(point["appended_requests"]),
        f"{point['fetched_tokens'] / 1e3:.0f}", f"{point['restored_tokens'] / 1e3:.0f}", busy,
        "-" if point["storage_busy"] is None else f"{point['storage_busy']:.2f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _kept(points: list[Figures], limit: float) -> str:
    """Returns the points within the limit. Rates increased until one missed the limit."""
    kept = [one["rate"] for one in points if one["ttft_seconds"]["p90"] <= limit]
    if not kept:
        return f"less than {points[0]['rate']:g}"
    missed = len(kept) < len(points)
    return f"{max(kept):g}" if missed else f"{max(kept):g} or more"


def _folded(text: str, width: int = 110) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) >= width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def main(argv: list[str]) -> None:
    del argv
    path = RESULTS / f"{NAME}.json"
    path.with_suffix(".md").write_text(page(json.loads(path.read_text())))


if __name__ == "__main__":
    app.run(main)
