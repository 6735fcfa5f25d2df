"""Requests of all kinds of sampling, their streams, and the streams of each alone."""

import random

from jdisagg.config import Mode
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, running
from tests.fakes.cluster import Collected
from tests.shapes import config

SENTENCE = (
    "once upon a time there was a little dog who lived in the forest and it liked to play with a"
    " red ball under the big tree"
)


WORDS = SENTENCE.split()


def mixed_requests(run: Running) -> list[Request]:
    """32 requests: greedy and seeded, prompts of 1 to 400 tokens, penalties, stops, bias, minimum
    lengths, n = 2."""
    rng = random.Random(7)
    lengths = [
        1,
        2,
        15,
        16,
        17,
        63,
        64,
        65,
        128,
        400,
        399,
        *(rng.randint(1, 400) for _ in range(21)),
    ]
    requests = []
    for index, length in enumerate(lengths):
        text = " ".join(rng.choice(WORDS) for _ in range(length))
        ids = (run.tokenizer.encode(text) * length)[:length]
        options: dict[str, object] = {"max_tokens": rng.choice((5, 20, 40, 60))}
        if index % 2:
            options |= {"temperature": rng.choice((0.5, 0.8, 1.2)), "seed": rng.getrandbits(40)}
        if index % 4 == 1:
            options |= {"top_p": 0.9, "top_k": rng.choice((0, 20))}
        if index % 5 == 2:
            options |= {
                "presence_penalty": 0.4,
                "frequency_penalty": 0.3,
                "repetition_penalty": 1.2,
            }
        if index % 6 == 3:
            options |= {"stop": ("the", ". ")}
        if index % 7 == 4:
            options |= {"logit_bias": ((20, 3.0), (300, -100.0)), "min_tokens": 4}
        if index % 8 == 5:
            options |= {"n": 2, "logprobs": 3}
        if index % 3:
            options |= {"ignore_eos": True}
        requests.append(run.request(ids, f"r{index}", **options))
    return requests


def streams(done: list[Collected]) -> list[object]:
    return [(one.tokens, one.text, one.finish) for one in done]


_REFERENCE: list[object] = []


async def reference() -> list[object]:
    """One by one, unified, on one device."""
    if not _REFERENCE:
        async with running(config(Mode.UNIFIED)) as run:
            _REFERENCE.extend(
                streams([await run.complete(request) for request in mixed_requests(run)])
            )
    return _REFERENCE
