"""Generates workloads of conversations, in which each prompt starts with all earlier prompts and
answers of its conversation.

Blocks of prompts and answers have names, by which prefix caches find the earlier turns. Arrivals
are an open loop: each turn arrives one think time after the arrival of the previous turn, even if
the previous answer has not ended."""

import math
from dataclasses import dataclass

import numpy as np

from jdisagg.errors import WorkloadError
from jdisagg.simulator.workloads import Arrival, Lengths, poisson

BLOCKS_OF_ONE = 24  # bits of a block name that number the blocks of one conversation


@dataclass(frozen=True, slots=True)
class ConversationTurns:
    """Describes how conversations are drawn.

    Args:
        mean: Mean number of turns of a conversation, at least 1. The number has a geometric
            distribution.
        think_seconds: Mean seconds between the arrivals of two consecutive turns. The time has an
            exponential distribution.

    Raises:
        WorkloadError: A value is out of range.
    """

    mean: float = 5.0
    think_seconds: float = 30.0
    system_tokens: int = 0
    block_tokens: int = 512
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise WorkloadError(
                f"conversations must have 1 turn or more on average, got {self.mean!r}"
            )
        if not (math.isfinite(self.think_seconds) and self.think_seconds >= 0):
            raise WorkloadError(
                f"think time must be 0 or more seconds, got {self.think_seconds!r}; give how long"
                " a user takes"
            )
        if self.system_tokens < 0 or self.block_tokens < 1:
            raise WorkloadError(
                f"a system prompt of {self.system_tokens} tokens in blocks of {self.block_tokens}:"
                " must be 0 or more in blocks of 1 or more"
            )


def conversations(
    rate: float,
    count: int,
    lengths: Lengths,
    turns: ConversationTurns = ConversationTurns(),
    seed: int = 0,
) -> list[Arrival]:
    """Returns the first `count` requests of many conversations, in order of arrival.

    Args:
        rate: Mean number of requests per second in steady state. Conversations begin as a Poisson
            process.
        lengths: Distribution of a turn's lengths in tokens, as (new user message, answer).
    """
    begins = poisson(rate / turns.mean, count, lengths, seed)
    random = np.random.default_rng((seed, 1))
    found: list[Arrival] = []
    for number, begin in enumerate(begins):
        many = int(random.geometric(1 / turns.mean))
        thought = random.exponential(turns.think_seconds, many - 1) if many > 1 else np.zeros(0)
        times = begin.at_seconds + np.concatenate([[0.0], np.cumsum(thought)])
        words, answers = lengths.draw(random, many)
        found += _conversation(number, times, words, answers, turns)
    found.sort(key=lambda item: item.at_seconds)
    return found[:count]


def _conversation(
    number: int, times: np.ndarray, words: np.ndarray, answers: np.ndarray, turns: ConversationTurns
) -> list[Arrival]:
    size, shared = turns.block_tokens, turns.system_tokens // turns.block_tokens
    said, found = turns.system_tokens, []
    for at, asked, answered in zip(times.tolist(), words.tolist(), answers.tolist(), strict=True):
        prompt, end = said + asked, said + asked + answered
        if turns.context_tokens is not None and end > turns.context_tokens:
            break
        blocks = tuple(
            block if block < shared else (number + 1) << BLOCKS_OF_ONE | block
            for block in range(-(-end // size))
        )
        found.append(Arrival(at, prompt, answered, blocks))
        said = end
    return found
