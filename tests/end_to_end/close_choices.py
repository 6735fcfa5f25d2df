"""Streams that may part where the choice was close."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.layout.axes import Layout
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_model

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
