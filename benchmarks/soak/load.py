"""Streams with expected tokens: the requests that the tests send, and the tokens that each request
must return.

The expected tokens come from one instance on one device in this process, one request at a time,
without hand-offs, batches or faults."""

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from jdisagg.client import AsyncClient, GenerateOptions
from jdisagg.config import Mode
from jdisagg.errors import JdisaggError, UnavailableError
from tests.end_to_end.clusters import config, running

DEADLINE_SECONDS = 90.0


@dataclass(frozen=True)
class Kind:
    """A request and its expected answer."""

    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None
    expected: tuple[int, ...] = ()
    text: str = ""

    @property
    def options(self) -> GenerateOptions:
        sampling: dict[str, Any] = (
            {"temperature": 0.0}
            if self.seed is None
            else {"temperature": 0.8, "top_k": 50, "seed": self.seed}
        )
        return GenerateOptions(
            token_ids=self.token_ids, max_tokens=self.max_tokens, ignore_eos=True, **sampling
        )


async def known_kinds(
    count: int,
    *,
    seed: int = 0,
    tokens: Sequence[int] = (24, 60, 300),
    prompts: Sequence[int] = (3, 40, 70, 150, 200),
) -> list[Kind]:
    """Returns greedy and seeded requests, with prompts of one and of several chunks, and the
    expected tokens of each."""
    rng = random.Random(seed)
    kinds = []
    async with running(config(Mode.UNIFIED, decode="tp=1", slots=1)) as run:
        for index in range(count):
            ids = tuple(rng.randrange(300) for _ in range(prompts[index % len(prompts)]))
            kind = Kind(ids, tokens[index % len(tokens)], index if index % 2 else None)
            options = {
                name: value for name, value in kind.options.items() if name not in ("token_ids",)
            }
            done = await run.complete(run.request(ids, f"oracle-{index}", **options))
            kinds.append(
                Kind(
                    kind.token_ids, kind.max_tokens, kind.seed, tuple(done.tokens[0]), done.text[0]
                )
            )
    return kinds


@dataclass
class Stream:
    """One request as its client observed it."""

    kind: Kind
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    asked_at: float | None = None
    ended_at: float | None = None
    error: Exception | None = None
    refusals: int = 0

    @property
    def wrong(self) -> str:
        """Returns a description of what is wrong; "" for a complete, correct stream."""
        if self.error is not None:
            return f"after {len(self.tokens)} tokens: {type(self.error).__name__}: {self.error}"
        if tuple(self.tokens) != self.kind.expected:
            pairs = zip(self.tokens, self.kind.expected, strict=False)
            first = next(
                (index for index, (got, due) in enumerate(pairs) if got != due), len(self.tokens)
            )
            return (
                f"wrong from token {first} of {len(self.kind.expected)} on:"
                f" {self.tokens[first : first + 4]}"
            )
        return "" if self.text == self.kind.text else f"right tokens, wrong text {self.text!r}"

    def pause_after(self, instant: float) -> float | None:
        """Returns the seconds from `instant` to the next event. None if the request was sent later
        or had already ended."""
        if (
            self.asked_at is None
            or self.asked_at > instant
            or (self.ended_at is not None and self.ended_at <= instant)
        ):
            return None
        later = [at for at in self.times if at > instant]
        return (later[0] if later else (self.ended_at or time.monotonic())) - instant

    async def run(
        self, client: AsyncClient, deadline_seconds: float = DEADLINE_SECONDS
    ) -> "Stream":
        """Runs the request and records how it ended. Never raises. If a server that shuts down
        refuses the request, sends it again."""
        self.asked_at = time.monotonic()
        while True:
            try:
                await self._run(client, self.asked_at + deadline_seconds - time.monotonic())
            except (JdisaggError, AssertionError) as error:
                if (
                    not self.times
                    and isinstance(error, UnavailableError)
                    and "shutting down" in str(error)
                ):
                    self.refusals += 1
                    await asyncio.sleep(0.2)
                    continue
                self.error = error
            self.ended_at = time.monotonic()
            return self

    async def _run(self, client: AsyncClient, seconds: float) -> None:
        named = GenerateOptions(request_id=uuid.uuid4().hex, deadline_seconds=seconds)
        async with aclosing(client.generate(**{**self.kind.options, **named})) as events:
            async for event in events:
                if event.token_ids and event.first_index != len(self.tokens):
                    raise AssertionError(
                        f"token {event.first_index} came where {len(self.tokens)} was due"
                    )
                self.tokens += event.token_ids
                self.text += event.text
                self.times.append(time.monotonic())
