"""Drafts that are known to be right or wrong."""

import random
from dataclasses import replace

import pytest

from jdisagg.config import EngineConfig
from jdisagg.request import Request
from jdisagg.scheduler import speculation
from jdisagg.scheduler.sequences import Sequence
from tests.end_to_end.clusters import Running
from tests.fakes.cluster import Collected


class KnowingDrafter:
    """Predicts the known streams of requests, with some wrong tokens: a part `errors` of all."""

    source, kinds, on_mesh = "ngram", 1, False
    streams: dict[str, dict[int, list[int]]] = {}
    errors = 0.3

    def __init__(self) -> None:
        self._random = random.Random(5)

    def draft(self, child: Sequence, most: int) -> speculation.Draft | None:
        known = self.streams.get(child.group.request.request_id, {}).get(child.child, [])
        coming = known[len(child.generated) : len(child.generated) + most]
        wrong = [
            token if self._random.random() > self.errors else self._random.randrange(100)
            for token in coming
        ]
        return speculation.Draft(0, tuple(wrong)) if wrong else None


def speculating(engine: EngineConfig, source: str = "ngram") -> EngineConfig:
    return replace(engine, decode=replace(engine.decode, speculate=source))


def counted(run: Running, name: str) -> int:
    return sum(worker.counters[f"{name}_tokens"] for worker in run.cluster._workers)


def learn(knowing: type[KnowingDrafter], asked: list[Request], done: list[Collected]) -> None:
    knowing.streams = {
        request.request_id: {child: list(tokens) for child, tokens in one.tokens.items()}
        for request, one in zip(asked, done, strict=True)
    }


def same_logprobs(done: list[Collected], expected: list[Collected]) -> None:
    for one, other in zip(done, expected, strict=True):
        assert one.logprobs.keys() == other.logprobs.keys()
        for child, values in one.logprobs.items():
            assert len(values) == len(other.logprobs[child])
            for value, wanted in zip(values, other.logprobs[child], strict=True):
                assert value.logprob == pytest.approx(wanted.logprob, abs=1e-4)
                assert [token for token, _ in value.top] == [token for token, _ in wanted.top]
