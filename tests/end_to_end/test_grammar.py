"""Structured output over real programs: every answer follows its grammar, and where it runs, what
runs beside it and what happens to its workers change no token."""

import json

import jsonschema
import pytest

from jdisagg.config import Mode
from jdisagg.request import FinishReason, Grammar, GrammarKind, Request
from tests.end_to_end.clusters import Running, config, running
from tests.end_to_end.schemas import random_schema
from tests.fakes.cluster import Collected

pytestmark = pytest.mark.ci

PROMPT = "once upon a time there was a little dog"
SCHEMAS, PLAIN = 12, 3
FEW = 6


def constrained(run: Running, name: str, grammar: Grammar, **options: object) -> Request:
    given = {"temperature": 1.0, "seed": sum(name.encode()), "max_tokens": 160}
    return run.request(PROMPT, name, grammar=grammar, **(given | options))


def requests(run: Running) -> list[Request]:
    """Random schemas, and requests without a grammar among them."""
    found = []
    for seed in range(SCHEMAS):
        schema = json.dumps(random_schema(seed))
        options = {"n": 2} if seed % 5 == 0 else {"logprobs": 3} if seed % 5 == 1 else {}
        found.append(
            constrained(
                run, f"s{seed}", Grammar(GrammarKind.JSON_SCHEMA, schema), seed=seed, **options
            )
        )
        if seed % (SCHEMAS // PLAIN) == 2:
            found.append(run.request(PROMPT, f"plain{seed}", temperature=0.8, seed=seed))
    return found


def streams(done: list[Collected]) -> list[object]:
    return [(one.tokens, one.text, one.finish) for one in done]


_reference: list[list[Collected]] = []


async def reference() -> list[Collected]:
    """Unified, on one device."""
    if not _reference:
        async with running(config(Mode.UNIFIED, decode="tp=1")) as run:
            _reference.append(await run.complete_all(requests(run)))
    return _reference[0]


async def test_what_is_sampled_under_a_random_schema_follows_it() -> None:
    done = await reference()
    async with running(config(Mode.UNIFIED, decode="tp=1")) as run:
        asked = requests(run)
    whole = 0
    for request, one in zip(asked, done, strict=True):
        grammar = request.sampling.grammar
        for child, finish in one.finish.items() if grammar else ():
            if finish is FinishReason.STOP:
                whole += 1
                jsonschema.validate(json.loads(one.text[child]), json.loads(grammar.text))
    assert whole > SCHEMAS / 2, "hardly anything to judge"


async def test_two_meshes_that_preempt_give_the_tokens_of_one() -> None:
    """Pages for a part of the sequences, and several steps a command."""
    engine = config(
        prefill="tp=2", decode="tp=1", decode_page=8, pages=30, growth=1, steps=2, slots=4
    )
    async with running(engine) as run:
        done, _ = await run.complete_preempted(requests(run)[:FEW])
    assert streams(done) == streams((await reference())[:FEW])
