"""Sequences with drafts, grammars and limited reasoning that are handed off, moved, preempted and
whose workers die, in virtual time: every answer is the one that an undisturbed run without drafts
gives."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jdisagg.grammar.chat_answers import marker, with_thought_and_calls
from jdisagg.request import Grammar, GrammarKind, Request
from jdisagg.scheduler import speculation
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.sequences import Sequence
from tests.chat.reasoning_forms import FORMS
from tests.dispatch.deaths import outlive
from tests.fakes.cluster import Fleet, toy_request
from tests.fakes.fake_executor import Costs, toy_limits
from tests.fakes.toy_grammars import END, GRAMMARS, toy_grammar
from tests.fakes.toy_model import expected_tokens

REGEX = "[a-f]{3}(-[0-9]{4}){2,6}"
AGES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "ages": AGES},
    "required": ["kind", "ages"],
    "additionalProperties": False,
}


class RandomDrafter:
    """Predicts the answer that the oracle gives, with a part of wrong tokens, now and then none."""

    source, kinds, on_mesh = "ngram", 1, False

    def __init__(self) -> None:
        self._random = random.Random(4)
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def draft(self, child: Sequence, most: int) -> speculation.Draft | None:
        request = child.group.request
        key = request.request_id, child.child
        if key not in self._known:
            self._known[key], _ = expected_tokens(request, child.child, 128)
        coming = self._known[key][len(child.generated) : len(child.generated) + most]
        errors = self._random.choice((0.0, 0.2, 0.7))
        wrong = [
            self._random.randrange(90) if self._random.random() < errors else one for one in coming
        ]
        return speculation.Draft(0, tuple(wrong)) if wrong and self._random.random() < 0.8 else None


@pytest.fixture(autouse=True)
def drafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(speculation, "NgramDrafter", RandomDrafter)
        yield


def limits(pages: int = 64, slots: int = 4) -> MeshLimits:
    return replace(toy_limits(pages_per_rank=pages, slots_per_rank=slots), speculates=True)


def some_grammars() -> list[Grammar | None]:
    """Of two kinds, and reasoning of every form that ends after a budget, once before content that
    a grammar binds."""
    regex = toy_grammar(GrammarKind.REGEX, REGEX)
    limited = [
        form.limited(budget, begun=True)
        for form, budget in zip(FORMS.values(), (0, 1, 17, 5, 9), strict=True)
    ]
    marks = marker("<think>", None), marker("</think>", None)
    bound = with_thought_and_calls(regex, marks, True, [])
    GRAMMARS._find(bound)
    bound = replace(bound, thought=FORMS["deepseek"].thought(7, begun=True))
    schema = toy_grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    return [regex, schema, None, bound, *limited]


def with_grammars() -> list[Request]:
    """Greedy and not, with penalties, of two children."""
    return [
        toy_request(
            number,
            prompt_tokens=10 + 5 * number,
            stop_ids=(END,),
            max_tokens=60,
            temperature=float(number % 2),
            seed=number,
            n=1 + (number % 4 == 3),
            repetition_penalty=1.0 + 0.1 * (number % 6 == 1),
            logprobs=number % 2 or None,
            grammar=grammar,
        )
        for number, grammar in enumerate(some_grammars())
    ]


def requests(count: int) -> list[Request]:
    """With and without grammars, penalties and several children; greedy and not."""
    free = [
        toy_request(
            100 + number,
            prompt_tokens=5 + 7 * number,
            stop_ids=(number,),
            max_tokens=60,
            min_tokens=3 * (number % 3),
            temperature=float(number % 2),
            seed=number,
            n=1 + number % 2,
            frequency_penalty=0.1 * (number % 3),
            logprobs=number % 2 or None,
        )
        for number in range(count)
    ]
    return [*free, *with_grammars()]


def verified(fleet: Fleet) -> tuple[int, int]:
    """Drafts that were accepted and rejected, as the meshes saw it."""
    meshes = [
        process.mesh for name, process in fleet.processes.items() if name.startswith("decode")
    ]
    return sum(mesh.accepted for mesh in meshes), sum(mesh.rejected for mesh in meshes)


async def test_a_disturbed_fleet_gives_every_stream_and_drafts_were_accepted_and_rejected() -> None:
    async with Fleet(decode=limits(300, 16), wire=True) as fleet:
        streams = asyncio.create_task(fleet.collect_all(requests(6)))
        await asyncio.sleep(0.1)
        await fleet.decode_worker("decode0").drain(30.0)
        await streams
        assert fleet.path.counters["sequences_moved"] > 0
        accepted, rejected = verified(fleet)
        assert accepted > 50 and rejected > 50
        counters = fleet.decode_worker("decode1").counters
        assert 0 < counters["accepted_tokens"] < counters["drafted_tokens"]


@pytest.mark.parametrize(("name", "seconds"), [("decode0", 0.1), ("prefill0", 0.01)])
async def test_streams_go_on_when_a_worker_dies(name: str, seconds: float) -> None:
    costs = Costs(prefill_token=1e-3, pull=0.02)
    async with Fleet(decode=limits(), costs=costs) as fleet:
        await outlive(fleet, fleet.collect_all(requests(6)), name, seconds)


async def test_too_few_pages_cut_drafts_and_change_no_stream() -> None:
    decode = limits(40, 8)
    async with Fleet(decodes=1, decode=decode, growth_tokens=1) as fleet:
        await fleet.collect_all(requests(8))
        worker = fleet.decode_worker("decode0")
        status = await worker.status()
        assert status.preemptions > 0 and 0 < status.accepted_tokens < status.drafted_tokens
        accepted, rejected = verified(fleet)
        assert accepted > 50 and rejected > 50
