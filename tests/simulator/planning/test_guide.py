"""The web page's guide: the same arrivals in three modes, and the differences between them."""

import math
from functools import cache

import pytest

from jdisagg.errors import InvalidRequestError
from jdisagg.simulator.planning.guide import (
    GUIDE_LINKS,
    SHOWN_REQUESTS,
    SHOWN_RUNS,
    GuideAnswer,
    GuideQuestion,
    GuideRequest,
    answer,
    parse_question,
)

FAST, SLOW = "infiniband-ndr", "ethernet-10g"


@cache
def asked(link: str) -> GuideAnswer:
    return answer(GuideQuestion(prompt_tokens=4096, rate=2.0, link=link))


def arrivals(requests: list[GuideRequest]) -> list[tuple[float, int]]:
    return [(request.arrival, request.prompt_tokens) for request in requests]


def test_all_three_ways_have_the_same_arrivals_and_all_finish() -> None:
    given = asked(FAST)
    assert [way.mode for way in given.ways] == ["unified", "chunked", "disaggregated"]
    first, *others = [arrivals(way.requests) for way in given.ways]
    assert all(other == first for other in others)
    assert {tokens for _, tokens in first} == {given.short_tokens, 4096}
    assert len(first) == min(given.requests, SHOWN_REQUESTS)


@pytest.mark.parametrize("which", range(3))
def test_the_runs_of_gaps_lead_from_the_first_token_to_the_last(which: int) -> None:
    for request in asked(FAST).ways[which].requests:
        assert request.first_token is not None and len(request.gaps) <= SHOWN_RUNS
        assert sum(count for _, count in request.gaps) == 127
        last = request.first_token + math.fsum(gap * count for gap, count in request.gaps)
        assert last == pytest.approx(request.finish, abs=0.01)


def test_a_prefill_stops_the_streams_of_a_unified_mesh_and_of_no_other() -> None:
    unified, chunked, apart = asked(FAST).ways
    assert unified.tbt[2] and chunked.tbt[2] and apart.tbt[1] and unified.tbt[1]
    assert unified.tbt[2] > 4 * chunked.tbt[2]
    assert apart.tbt[1] < chunked.tbt[1]  # type: ignore[operator]


def test_a_slow_link_is_felt_where_kv_crosses_it_and_nowhere_else() -> None:
    fast, slow = asked(FAST).ways, asked(SLOW).ways
    assert fast[:2] == slow[:2]
    assert slow[2].tbt[2] > 4 * fast[2].tbt[2]  # type: ignore[operator]


@pytest.mark.parametrize(
    "body, named",
    [
        (b'{"rate": 1000}', "rate"),
        (b'{"prompt_tokens": 1}', "prompt_tokens"),
        (b'{"prompt_tokens": "many"}', "prompt_tokens"),
        (b'{"link": "carrier pigeon"}', "link"),
        (b'{"seed": 3}', "seed"),
        (b"[]", "object"),
        (b"\xff", "guide"),
        (b"", "guide"),
    ],
)
def test_a_question_out_of_bounds_is_refused_by_name(body: bytes, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        parse_question(body)


def test_every_link_of_the_page_is_one_that_can_be_asked_for() -> None:
    assert {GuideQuestion(link=name).link for name in GUIDE_LINKS} == set(GUIDE_LINKS)
