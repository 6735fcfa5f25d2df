"""The page on papers about prefix caches is what the code gives from its JSON, and a repeated run
gives the committed figures."""

import json
from dataclasses import replace

import pytest

from benchmarks.commits import RESULTS
from benchmarks.reuse_papers_page import AGAINST, page
from benchmarks.reuse_papers_runs import CASES, GRAIN, figures_of, later_turns, opened
from jdisagg.simulator.workloads import Arrival

FIGURES = json.loads((RESULTS / "reuse_papers.json").read_text())


def test_the_page_is_what_its_json_gives() -> None:
    assert (RESULTS / "reuse_papers.md").read_text() == page(FIGURES)


@pytest.mark.parametrize("name", list(CASES))
def test_the_runs_of_each_case_are_those_of_its_json_and_all_requests_ended(name: str) -> None:
    known = FIGURES["cases"][name]["runs"]
    runs = {run.name: run for run in CASES[name].runs()}
    assert list(known) == list(runs) and AGAINST[name] == next(iter(known))
    for run, said in known.items():
        assert said["differs"] == runs[run].differs
        for point in said["points"]:
            assert point["finished"] == point["requests"] == runs[run].talk.requests
            assert point["pages_lost"] == 0


@pytest.mark.ci
def test_a_committed_run_made_again_gives_the_committed_figures() -> None:
    run = next(run for run in CASES["ppd"].runs() if run.name == "append")
    (point,) = FIGURES["cases"]["ppd"]["runs"]["append"]["points"]
    again = figures_of(run, point["rate"])
    assert again["appended_requests"] == pytest.approx(point["appended_requests"], rel=0.05)
    for name in ("ttft_seconds", "tpot_seconds"):
        assert again[name]["p50"] == pytest.approx(point[name]["p50"], rel=0.02)  # type: ignore[index]


def test_an_opening_is_its_conversations_own_and_a_later_turn_begins_with_it() -> None:
    talk = replace(CASES["dualpath"].runs()[0].talk, requests=40)
    plain = replace(talk, opening_tokens=0).at(4.0)
    found = talk.at(4.0)
    size = talk.turns.block_tokens
    blocks = talk.opening_tokens // size
    whole: dict[tuple[int, ...], Arrival] = {}
    for one, without, later in zip(found, plain, later_turns(found), strict=True):
        assert one.prompt_tokens == without.prompt_tokens + talk.opening_tokens
        assert one.block_hashes[blocks:] == without.block_hashes
        opening = one.block_hashes[:blocks]
        assert (opening in whole) is later
        if later:
            said = whole[opening].block_hashes
            full = (whole[opening].prompt_tokens + whole[opening].output_tokens) // size
            assert one.block_hashes[:full] == said[:full]
        whole[opening] = one
    assert len({name for one in found for name in one.block_hashes[:blocks]}) == blocks * len(whole)
    assert opened(Arrival(0.0, 10, 5, (1 << 24,)), 0, GRAIN) == Arrival(0.0, 10, 5, (1 << 24,))
