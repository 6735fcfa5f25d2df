"""Requests with grammars."""

import json
import re

from jdisagg.request import FinishReason, GrammarKind, Request
from tests.fakes.cluster import Collected, Fleet, toy_request
from tests.fakes.toy_grammars import END, toy_grammar, toy_text

REGEX = "[a-f]{3}(-[0-9]{4}){2,6}"
AGES = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "ages": AGES},
    "required": ["kind", "ages"],
    "additionalProperties": False,
}


def requests(count: int) -> list[Request]:
    """With grammars of two kinds and without one, greedy and not, with penalties, of two
    children."""
    grammars = (
        toy_grammar(GrammarKind.REGEX, REGEX),
        toy_grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        None,
    )
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
            grammar=grammars[number % 3],
        )
        for number in range(count)
    ]


async def follow(fleet: Fleet, asked: list[Request]) -> None:
    """Streams all at once; each is the undisturbed one, and what its grammar says."""
    answers = await fleet.collect_all(asked)
    ended = sum(map(follows, asked, answers))
    assert ended > len(asked) / 3, "hardly an answer was whole"


def follows(request: Request, answer: Collected) -> int:
    """How many of its answers are whole, all of which follow."""
    grammar, ended = request.sampling.grammar, 0
    for child, reason in answer.finish.items() if grammar is not None else ():
        text = toy_text(tuple(answer.tokens[child]))
        if reason is not FinishReason.STOP:
            continue
        ended += 1
        if grammar is not None and grammar.kind is GrammarKind.REGEX:
            assert re.fullmatch(REGEX, text)
        else:
            found = json.loads(text)
            assert found["kind"] in ("cat", "dog") and all(age <= 99 for age in found["ages"])
    return ended
