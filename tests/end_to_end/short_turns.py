"""Conversations of short turns, for models with short contexts."""

from jdisagg.config import EngineConfig
from jdisagg.request import Request
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.conversations import Conversations


class Talk(Conversations):
    """Short turns of random tokens, some of which branch off from within an earlier answer."""

    BEGINNINGS = (20, 45, 75)

    def words(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, 130) for _ in range(tokens))

    def _next(self) -> Request:
        rng, self._count = self._random, self._count + 1
        history = rng.choice(self._histories)
        if self._count % 3 == 0:
            history = history[: rng.randrange(len(history))]
        ids = (history + self.words(rng.choice((1, 3, 16, 30))))[:150]
        options: dict[str, object] = {"max_tokens": rng.choice((3, 18, 35)), "ignore_eos": True}
        if self._count % 2:
            options |= {"temperature": 0.8, "seed": rng.getrandbits(40), "top_p": 0.9}
        if self._count % 4 == 1:
            options |= {"n": 2}
        if self._count % 5 == 2:
            options |= {"logprobs": 2}
        return self._run.request(ids, f"r{self._count}", **options)


async def converse(engine: EngineConfig, waves: int = 3) -> tuple[list[object], int, Running]:
    """The streams, and the number of cached tokens."""
    async with running(engine) as run:
        talk, streams, cached = Talk(run, seed=11), [], 0
        for _ in range(waves):
            asked = talk.wave(4)
            done = await run.complete_all(asked)
            talk.heard(asked, done)
            streams += [(one.tokens, one.finish) for one in done]
            cached += sum(one.usage.cached_tokens for one in done if one.usage)
        for worker in run.cluster._workers:
            for kept in worker._kept.snapshots:
                assert kept.pending == 0 and kept.free + kept.filled == kept.total
    return streams, cached, run
