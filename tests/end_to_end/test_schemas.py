"""What is sampled under a JSON schema is valid by the library `jsonschema`: 20 schemas of all kinds
in the lane ci, 500 in the lane slow (`-s` prints how many of its answers were whole). The same
holds for preempted sequences on two meshes, which have the tokens of undisturbed ones on one
mesh."""

import json
import re
from collections.abc import Sequence
from datetime import date, datetime

import jsonschema
import numpy as np
import pytest

from jdisagg.config import Mode
from jdisagg.grammar.matcher import mask_words
from jdisagg.request import FinishReason, Grammar, GrammarKind, Request
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.wide_schemas import wide_schema
from tests.fakes.cluster import Collected
from tests.shapes import FEW_PAGES, config

PROMPT = "once upon a time there was a little dog"
FEW, MANY, FIRST_OF_MANY = 20, 500, 1000
AT_ONCE = 40  # at most 64 grammars wait to be compiled
PREEMPTED, TOGETHER = 48, 12
PREEMPTED_TOKENS = 120

FORMATS = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(text: object) -> bool:
    """RFC 3339, section 5.6; the 60th second is one that leaps."""
    if isinstance(text, str):
        day, _, clock = text.upper().partition("T")
        date.fromisoformat(day)
        return is_time(clock)
    return True


@FORMATS.checks("time", raises=ValueError)
def is_time(text: object) -> bool:
    if isinstance(text, str):
        if not re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)", text, re.I):
            return False
        second = re.sub(r"(:\d\d):60", r"\1:59", re.sub(r"\.\d+", "", text.upper()))
        datetime.fromisoformat(f"2026-01-01T{second}")
    return True


@FORMATS.checks("hostname")
def is_hostname(text: object) -> bool:
    label = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
    return not isinstance(text, str) or bool(re.fullmatch(rf"{label}(\.{label})*", text, re.I))


@FORMATS.checks("duration")
def is_duration(text: object) -> bool:
    day = r"(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?"
    return not isinstance(text, str) or bool(re.fullmatch(rf"P(?=.)(\d+W|{day})", text))


def asked(run: Running, seeds: Sequence[int], max_tokens: int) -> list[Request]:
    return [
        run.request(
            PROMPT,
            f"schema{seed}",
            grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wide_schema(seed))),
            temperature=1.0,
            seed=seed,
            max_tokens=max_tokens,
        )
        for seed in seeds
    ]


async def answered(run: Running, requests: Sequence[Request]) -> list[Collected]:
    done: list[Collected] = []
    for first in range(0, len(requests), AT_ONCE):
        done += await run.complete_all(requests[first : first + AT_ONCE])
    return done


def whole(requests: Sequence[Request], done: Sequence[Collected]) -> int:
    """How many were not cut by their length. All of those are valid."""
    faults, ended = [], 0
    for request, one in zip(requests, done, strict=True):
        assert request.sampling.grammar is not None
        schema = json.loads(request.sampling.grammar.text)
        if one.finish[0] is not FinishReason.STOP:
            assert one.finish[0] is FinishReason.LENGTH
            continue
        ended += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        found = list(validator.iter_errors(json.loads(one.text[0])))
        faults += [(request.request_id, error.message, one.text[0]) for error in found]
    assert not faults
    return ended


def forced_runs(run: Running, requests: Sequence[Request], done: Sequence[Collected]) -> list[int]:
    """How many tokens each time followed one another of which the grammar allowed that one alone:
    what could be taken without choosing. llguidance, asked for such tokens, says the same."""
    assert run.grammars is not None
    mask = np.zeros(mask_words(run.cluster.model.vocabulary), np.uint32)
    runs: list[int] = []
    for request, one in zip(requests, done, strict=True):
        grammar, length = request.sampling.grammar, 0
        assert grammar is not None
        matcher = run.grammars.matcher(grammar, request.sampling, request.stop_ids, ())
        for token in one.tokens[0]:
            matcher.fill(mask)
            (allowed,) = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert token in allowed
            assert (len(allowed) == 1) == bool(matcher._inner.compute_ff_tokens())
            if len(allowed) == 1:
                length += 1
            elif length:
                runs.append(length)
                length = 0
            matcher.consume((token,))
        runs += [length] if length else []
    return runs


def forced_words(runs: Sequence[int], done: Sequence[Collected]) -> str:
    tokens = sum(len(one.tokens[0]) for one in done)
    share, long = sum(runs) / tokens, sum(length for length in runs if length >= 4) / tokens
    return (
        f"{share:.1%} of {tokens} tokens were forced, {long:.1%} of them all in runs of four or"
        f" more; {sum(runs) / max(1, len(runs)):.1f} a run"
    )


@pytest.mark.ci
async def test_what_is_sampled_under_schemas_of_all_kinds_is_valid() -> None:
    async with running(config(Mode.UNIFIED)) as run:
        requests = asked(run, range(FEW), 250)
        done = await answered(run, requests)
        assert whole(requests, done) > 2, "hardly any to judge"
        assert sum(forced_runs(run, requests, done)) > FEW, "hardly any to compare"
    await preempted_equal(range(TOGETHER), done[:TOGETHER])


@pytest.mark.slow
async def test_what_is_sampled_under_five_hundred_schemas_is_valid() -> None:
    seeds = range(FIRST_OF_MANY, FIRST_OF_MANY + MANY)
    one_mesh = config(Mode.UNIFIED, slots=16, context=1024)
    async with running(one_mesh) as run:
        requests = asked(run, seeds, 700)
        done = await answered(run, requests)
        ended = whole(requests, done)
        print(f"{MANY} schemas: {ended} whole, all valid; {MANY - ended} cut by their length")
        print(forced_words(forced_runs(run, requests, done), done))
        assert ended > MANY / 3, "hardly any to judge"
    for first in range(0, PREEMPTED, TOGETHER):
        await preempted_equal(seeds[first : first + TOGETHER], done[first : first + TOGETHER])


async def preempted_equal(seeds: Sequence[int], undisturbed: Sequence[Collected]) -> None:
    """Two meshes, and pages for a part of the sequences."""
    async with running(config(**FEW_PAGES)) as run:
        requests = asked(run, seeds, PREEMPTED_TOKENS)
        done, preemptions = await run.complete_preempted(requests)
        print(f"preempted {preemptions} times among {len(requests)}")
        whole(requests, done)
    for one, other in zip(done, undisturbed, strict=True):
        assert one.tokens[0] == other.tokens[0][:PREEMPTED_TOKENS]
