"""The guide's answers: the same arrivals in three modes, the differences between them, and the
advice that follows from them."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest

from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import HARDWARE, LINKS
from jdisagg.errors import InvalidRequestError
from jdisagg.guide.answer import (
    SHOWN_REQUESTS,
    SHOWN_RUNS,
    GuideAnswer,
    GuideQuestion,
    GuideRequest,
    answer,
    arrivals_of,
    parse_question,
)
from jdisagg.guide.facts import GUIDE_LINKS
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.bounds import Demand, Goal
from jdisagg.simulator.planning.candidates import Candidate, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.trials import Trier
from jdisagg.simulator.report import SloLimits, summarise
from jdisagg.simulator.run import simulate

FAST, SLOW = "infiniband-ndr", "ethernet-10g"
QUESTION = GuideQuestion(prompt_tokens=4096, rate=2.0)


@cache
def asked(link: str, **others: object) -> GuideAnswer:
    return answer(GuideQuestion(**{"prompt_tokens": 4096, "rate": 2.0, "link": link, **others}))


def arrivals(requests: list[GuideRequest]) -> list[tuple[float, int]]:
    return [(request.arrival, request.prompt_tokens) for request in requests]


def test_all_three_ways_have_the_same_arrivals_and_all_finish() -> None:
    given = asked(FAST)
    assert [way.mode for way in given.ways] == ["unified", "chunked", "disaggregated"]
    first, *others = [arrivals(way.requests) for way in given.ways]
    assert all(other == first for other in others)
    assert {tokens for _, tokens in first} == {given.short_tokens, 4096}
    assert len(first) == min(given.requests, SHOWN_REQUESTS)
    for request in (request for way in given.ways for request in way.requests):
        assert request.first_token is not None and len(request.gaps) <= SHOWN_RUNS
        assert sum(count for _, count in request.gaps) == 127
        last = request.first_token + math.fsum(gap * count for gap, count in request.gaps)
        assert last == pytest.approx(request.finish, abs=0.01)


def test_the_figures_of_a_mode_are_those_of_a_simulation_of_its_fleet() -> None:
    instance = replace(INSTANCE, chunk_tokens=512)
    pool = Pool(2, HARDWARE["h100"], instance)
    shape, fast = geometry("llama-3.1-8b"), LINKS[FAST]
    fleet = Fleet(shape, pool, None, Mode.CHUNKED, link=fast, fused=True)
    outcomes = simulate(fleet, arrivals_of(QUESTION)).outcomes
    report = summarise(outcomes, SloLimits(1.0, 0.02, 0.1))
    (way,) = (way for way in asked(FAST).ways if way.mode == "chunked")
    assert (way.ttft_p90, way.tpot_p90) == (report.ttft.p90, report.tpot.p90)
    assert (way.met, way.goodput) == (report.attainment, report.goodput_per_second)
    assert way.pause_longest == max(item.gaps.longest for item in outcomes if item.gaps)


def test_the_highest_rates_are_those_of_stepping_the_same_candidates() -> None:
    site = Site(HARDWARE["h100"], 2, between=LINKS[FAST])
    workload, goal = arrivals_of(QUESTION), Goal(1.0, 0.02)
    runner = FleetMaker(geometry("llama-3.1-8b"), site).runners.stepped
    trier, one = Trier(goal, workload, Demand.of(workload), 400), Layout()
    candidates = (
        Candidate(Mode.UNIFIED, one, 2),
        Candidate(Mode.CHUNKED, one, 2, 512),
        Candidate(Mode.DISAGGREGATED, one, 1, prefill=one, prefill_instances=1),
    )
    for mode, candidate in zip(asked(FAST).advice.modes, candidates, strict=True):
        under, over = (
            trier.trial(runner, candidate, factor * mode.rate).lasting_attainment
            for factor in (0.9, 1.1)
        )
        assert under >= 0.9 > over, candidate.name


def test_a_request_that_pauses_in_the_picture_counts_against_its_mode() -> None:
    slow = asked(SLOW, prompt_tokens=16384, rate=4.0)
    way = slow.ways[2]
    paused = [any(gap > slow.pause_seconds for gap, _ in request.gaps) for request in way.requests]
    assert [("pause" in request.missed) for request in way.requests] == paused
    assert any(paused) and way.met < 0.9 and way.pause_p90 > slow.pause_seconds
    assert "pause for more than 100 ms" in way.verdict and slow.advice.mode != "disaggregated"


def test_a_full_link_is_named_with_both_rates() -> None:
    slow = asked(SLOW, prompt_tokens=16384, rate=8.0)
    tokens = sum(
        item.prompt_tokens for item in arrivals_of(GuideQuestion(prompt_tokens=16384, rate=8))
    )
    brought = 8 * tokens / slow.requests * 131_072 / 1e9
    said = re.search(r"bring ([\d.]+) GB/s of KV and the link carries 1 GB/s", slow.ways[2].verdict)
    assert said and float(said[1]) == pytest.approx(brought, rel=0.05)


def test_the_advice_is_the_simplest_mode_at_low_load_and_none_where_nothing_holds() -> None:
    low = asked(FAST, prompt_tokens=512, rate=0.5)
    assert low.advice.mode == "unified" and "load is low" in low.advice.sentence
    none = asked(FAST, tpot_seconds=0.005)
    assert none.advice.mode == "" and "at any rate" in none.advice.sentence
    many = asked(FAST, prompt_tokens=16384, rate=64.0)
    best = max(mode.rate for mode in many.advice.modes)
    assert many.advice.mode == ""
    assert f"about {math.ceil(2 * 64 / best)} accelerators" in many.advice.sentence


def test_the_advice_is_disaggregated_where_chunks_and_whole_prompts_disturb_streams() -> None:
    found = answer(
        GuideQuestion("deepseek-v3", "h200", prompt_tokens=8192, rate=4.0, ttft_seconds=2.0)
    )
    assert found.advice.mode == "disaggregated"
    assert found.ways[2].met >= 0.9 > max(way.met for way in found.ways[:2])
    rate = next(mode.rate for mode in found.advice.modes if mode.mode == "disaggregated")
    assert found.advice.sentence.startswith(
        f"Disaggregated (1 prefill, 1 decode) carries up to {rate:.3g}"
    )


WRONG = {
    b'{"rate": 1000}': "rate",
    b'{"prompt_tokens": 1}': "prompt_tokens",
    b'{"prompt_tokens": "many"}': "prompt_tokens",
    b'{"link": "carrier pigeon"}': "link",
    b'{"model": "gpt-7"}': "model",
    b'{"hardware": "abacus"}': "hardware",
    b'{"instances": 3}': "instances",
    b'{"chunk_tokens": 1000}': "chunk_tokens",
    b'{"tpot_seconds": 0}': "tpot_seconds",
    b'{"seed": 3}': "seed",
    b"[]": "object",
    b"\xff": "guide",
    b"": "guide",
}


def test_a_question_out_of_bounds_is_refused_by_name() -> None:
    for body, named in WRONG.items():
        with pytest.raises(InvalidRequestError, match=named):
            parse_question(body, GuideQuestion)
    assert {GuideQuestion(link=name).link for name in GUIDE_LINKS} == set(GUIDE_LINKS)
