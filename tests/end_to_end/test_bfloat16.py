"""Rule 1 in bfloat16: the same program and layout give the same streams, but another order of
summation may move a logit's last bits.

So where the streams of two layouts first differ, the choice must have been close: the dense pass's
two largest logits, given the same tokens so far (teacher forcing), differ by less than EPSILON. A
bfloat16 has 8 bits of mantissa: at logits around 16 neighbours are 0.06 apart, and roundings along
the layers add to that."""

import numpy as np
import pytest

from jdisagg.config import Mode
from tests.end_to_end.close_choices import EPSILON, Streams, check_parted, margins
from tests.end_to_end.clusters import running
from tests.shapes import DECODE, LLAMA, MOE, PREFILL, config

PROMPTS = (
    "Once upon a time",
    "There was a dog named",
    "One day a girl went to the park and",
    "The little boat was",
    "Tom and his mother",
)
TOKENS = 48


async def greedy_streams(engine: object, at_once: bool = True) -> Streams:
    """Of each prompt its tokens and the continuation's."""
    async with running(engine) as run:  # type: ignore[arg-type]
        requests = [
            run.request(prompt, f"r{index}", max_tokens=TOKENS, ignore_eos=True)
            for index, prompt in enumerate(PROMPTS)
        ]
        if at_once:
            answers = await run.complete_all(requests)
        else:
            answers = [
                answer for request in requests for answer in await run.complete_all([request])
            ]
        return [
            (request.prompt_token_ids, done.tokens[0])
            for request, done in zip(requests, answers, strict=True)
        ]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("directory", "prefill", "decode"),
    [
        pytest.param(LLAMA, PREFILL, DECODE, id="dense"),
        pytest.param(MOE, "dp=1,tp=4,ep=4", "dp=4,tp=1,ep=4", id="experts", marks=pytest.mark.slow),
    ],
)
async def test_layouts_part_only_where_the_choice_was_close(directory, prefill, decode):
    """Which prompts share a chunk, and so which programs run, is a matter of the moment when all
    are asked at once."""
    reference = await greedy_streams(config(Mode.UNIFIED, directory=directory, dtype="bfloat16"))
    split = config(prefill=prefill, decode=decode, directory=directory, dtype="bfloat16")
    check_parted(directory, reference, await greedy_streams(split))
    alone = await greedy_streams(split, at_once=False)
    check_parted(directory, reference, alone)
    assert await greedy_streams(split, at_once=False) == alone, (
        "the same programs gave other tokens"
    )


@pytest.mark.ci
async def test_most_choices_are_not_close():
    """Else the test above could not fail."""
    [(prompt, tokens), *_] = await greedy_streams(config(Mode.UNIFIED, dtype="bfloat16"))
    assert np.mean(margins(LLAMA, prompt, tokens) > EPSILON) > 0.5
