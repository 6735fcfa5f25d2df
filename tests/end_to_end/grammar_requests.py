"""Requests with grammars that force runs of tokens."""

import json

from jdisagg.request import Grammar, GrammarKind, Request
from tests.end_to_end.clusters import Running

PROMPT = "once upon a time there was a little dog"


PET = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "the kind of animal": {"enum": ["a little dog", "a little cat", "elephant"]},
        "years": {"type": "integer", "minimum": 0, "maximum": 30},
        "version": {"const": "2026-11-24, the first of its kind"},
        "words": {"type": "array", "items": {"enum": ["sun", "moon"]}, "maxItems": 3},
    },
    "required": ["the kind of animal", "years", "version", "words"],
    "additionalProperties": False,
}


SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PET))


REGEX = Grammar(GrammarKind.REGEX, r"(one two three four five [0-9]{1,3} ){2,9}the end")


def requests(run: Running) -> list[Request]:
    """Greedy and seeded, of several children, with penalties, log-probabilities, bias, least and
    most tokens, stop ids and stop strings within a run; and some without a grammar."""
    stop = run.tokenizer.encode(" four")[-1]
    options: list[dict[str, object]] = [
        {"grammar": SCHEMA},
        {"grammar": SCHEMA, "temperature": 1.0},
        {"grammar": REGEX, "temperature": 1.0, "n": 2},
        {"temperature": 0.8},
        {"grammar": SCHEMA, "temperature": 1.0, "repetition_penalty": 1.3},
        {"grammar": REGEX, "temperature": 1.0, "logprobs": 2},
        {"grammar": SCHEMA, "temperature": 1.0, "max_tokens": 13},
        {"grammar": REGEX, "min_tokens": 40, "temperature": 1.0},
        {"grammar": REGEX, "stop_token_ids": (stop,)},
        {"grammar": SCHEMA, "stop": ("first of",), "temperature": 0.7, "top_p": 0.9},
        {"grammar": SCHEMA, "logit_bias": ((stop, 4.0),), "temperature": 1.0},
        {},
    ]
    return [
        run.request(PROMPT[: 9 + 3 * seed], f"f{seed}", **({"max_tokens": 90, "seed": seed} | one))
        for seed, one in enumerate(options)
    ]
