"""Rule 1 in bfloat16: the same program and layout give the same streams, but another order of
summation may move a logit's last bits.

So where the streams of two layouts first differ, the choice must have been close: the dense pass's
two largest logits, given the same tokens so far (teacher forcing), differ by less than EPSILON. A
bfloat16 has 8 bits of mantissa: at logits around 16 neighbours are 0.06 apart, and roundings along
the layers add to that."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_model
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
EPSILON = 0.25


Streams = list[tuple[tuple[int, ...], list[int]]]


def margins(directory: Path, prompt: tuple[int, ...], tokens: list[int]) -> np.ndarray:
    """The dense bfloat16 pass's distance between its two largest logits, before each of
    `tokens`."""
    model = load_model(directory, Layout(), jax.devices()[-1:], dtype="bfloat16").model
    ids = jnp.asarray([*prompt, *tokens], jnp.int32)
    logits = np.asarray(
        jax.jit(
            lambda ids: model(ids, jnp.arange(ids.shape[0], dtype=jnp.int32), dense_causal_attend)
        )(ids)
    )
    largest = np.sort(logits[len(prompt) - 1 : -1], axis=-1)[:, -2:]
    return largest[:, 1] - largest[:, 0]


def check_parted(directory: Path, reference: Streams, streams: Streams) -> None:
    for (prompt, expected), (_, tokens) in zip(reference, streams, strict=True):
        assert len(tokens) == len(expected)
        parted = next(
            (
                index
                for index, pair in enumerate(zip(expected, tokens, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if parted is not None:
            margin = margins(directory, prompt, expected)[parted]
            assert margin < EPSILON, (
                f"streams part at token {parted}, where the choice was not close ({margin:.3f})"
            )


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
