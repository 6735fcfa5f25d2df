"""Sends the requests of a recorded trace to a running server, at the times in the trace. Records
the time of each token.

Blocks with equal hashes get equal token ids, so that the prefix cache has the hits that the trace
had. `TraceSender` is an open loop: a request is sent at its time in the trace, even if earlier
requests still run. Time to first token (TTFT) is measured from this time, so that a slow sender
does not hide delays."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from jdisagg.client import AsyncClient
from jdisagg.errors import ConfigError, JdisaggError, WorkloadError
from jdisagg.simulator.gaps import Gaps
from jdisagg.simulator.report import End, RequestOutcome
from jdisagg.simulator.workloads import Arrival, faster

# Tokenizers have special tokens below this id. Prompts use ids from here on. If the vocabulary is
# too small for this, prompts use all its ids.
FIRST_TOKEN = 256
LONG_TOKENS = 4096
ENDS_BY_STATUS: dict[str, End] = {
    "RESOURCE_EXHAUSTED": "refused",
    "DEADLINE_EXCEEDED": "deadline",
    "CANCELLED": "cancelled",
}


@dataclass(frozen=True, slots=True)
class ReplayPrompt:
    """`cut` is True if prompt or answer is shorter than in the trace, because of the server's
    context length or the caller's limit."""

    token_ids: tuple[int, ...]
    output_tokens: int
    cut: bool


class PromptMaker:
    """Creates the token ids of the prompt for each request of a trace. The ids of a block with a
    hash are derived from the hash. All other ids are derived from the request's index."""

    def __init__(
        self,
        vocabulary: int,
        context_tokens: int,
        *,
        block_tokens: int,
        max_prompt_tokens: int | None = None,
        max_output_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Creates the generator of prompts. `context_tokens`: largest number of tokens of prompt
        and answer together. If a request exceeds this number, the answer is shortened first, to at
        least half of the context, and then the prompt. Raises ConfigError if a number is below 1,
        or the context is too short for any prompt."""
        if context_tokens < 2:
            raise ConfigError(
                f"a context of {context_tokens} tokens holds no prompt and answer; serve the model"
                " with more"
            )
        for name, value in (
            ("max_prompt_tokens", max_prompt_tokens),
            ("max_output_tokens", max_output_tokens),
            ("block_tokens", block_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self._first = FIRST_TOKEN if vocabulary > 2 * FIRST_TOKEN else 0
        self._vocabulary, self._context, self._block_tokens = (
            vocabulary,
            context_tokens,
            block_tokens,
        )
        self._max_prompt, self._max_output, self._seed = max_prompt_tokens, max_output_tokens, seed

    def prompt(self, number: int, arrival: Arrival) -> ReplayPrompt:
        wanted_prompt, wanted_output = max(1, arrival.prompt_tokens), max(1, arrival.output_tokens)
        output = min(
            wanted_output,
            self._max_output or wanted_output,
            max(self._context // 2, self._context - wanted_prompt),
        )
        length = min(wanted_prompt, self._max_prompt or wanted_prompt, self._context - output)
        return ReplayPrompt(
            self._token_ids(number, arrival.block_hashes, length),
            output,
            (length, output) != (wanted_prompt, wanted_output),
        )

    def _token_ids(self, number: int, hashes: Sequence[int], length: int) -> tuple[int, ...]:
        parts: list[np.ndarray] = []
        have = 0
        for name in hashes:
            if have >= length:
                break
            parts.append(self._drawn(1, name, self._block_tokens))
            have += self._block_tokens
        if have < length:
            parts.append(self._drawn(0, number, length - have))
        return tuple(np.concatenate(parts)[:length].tolist())

    def _drawn(self, kind: int, name: int, count: int) -> np.ndarray:
        return np.random.default_rng((self._seed, kind, name & (2**64 - 1))).integers(
            self._first, self._vocabulary, count
        )


@dataclass(slots=True)
class ReplayProgress:
    """Passed to the caller's function `watch` at every change."""

    total: int
    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    cut: int = 0
    lag_seconds: float = 0.0  # largest delay with which a request was sent

    def text(self) -> str:
        return (
            f"{self.sent - self.ended} under way, {self.failed} refused or failed,"
            f" {self.tokens} tokens"
        )

    def notes(self) -> list[str]:
        cut = (
            f"{self.cut} of {self.total} requests were cut to what the server's context or the"
            " flags allow"
        )
        late = (
            f"the sender was late by up to {self.lag_seconds:.2f} s; TTFT counts from when requests"
            " were due"
        )
        return [cut] * (self.cut > 0) + [late] * (self.lag_seconds > 0.05)


class TraceSender:
    """Sends one trace to one server.

    Args:
        speed: Factor by which the trace's request rate is multiplied.
        deadline_seconds: Deadline of requests for which the trace has none, in seconds.
    """

    def __init__(
        self,
        client: AsyncClient,
        maker: PromptMaker,
        *,
        speed: float = 1.0,
        deadline_seconds: float | None = None,
        name: str = "trace",
    ) -> None:
        self._client, self._maker, self._speed, self._deadline, self._name = (
            client,
            maker,
            speed,
            deadline_seconds,
            name,
        )
        self._watch: Callable[[ReplayProgress], None] = lambda _: None
        self._progress = ReplayProgress(0)
        self._started = 0.0

    async def run(
        self, arrivals: Sequence[Arrival], watch: Callable[[ReplayProgress], None] | None = None
    ) -> list[RequestOutcome]:
        """Sends all requests and waits until they have finished. Cancelling this call cancels the
        running requests. Returns the outcome of each request, in order. Refused and failed requests
        have an outcome too. Times are relative to the time at which the first request was due.
        Raises WorkloadError if the trace has no requests."""
        if not arrivals:
            raise WorkloadError(
                "the trace has no requests to send; give another, or a larger limit"
            )
        moved = faster(arrivals, self._speed)
        due = [item.at_seconds - moved[0].at_seconds for item in moved]
        self._progress = ReplayProgress(len(arrivals))
        self._watch = watch or self._watch
        self._started = time.perf_counter()
        tasks: list[asyncio.Task[RequestOutcome]] = []
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                prompt = await self._made(number, arrival)
                await asyncio.sleep(max(0.0, due[number] - self._now()))
                tasks.append(group.create_task(self._send(number, arrival, due[number], prompt)))
        return [task.result() for task in tasks]

    async def _made(self, number: int, arrival: Arrival) -> ReplayPrompt:
        """Creates a prompt. A long prompt takes milliseconds and is therefore created in a thread,
        so that the event loop is not delayed and token times are correct."""
        if arrival.prompt_tokens < LONG_TOKENS:
            return self._maker.prompt(number, arrival)
        return await asyncio.to_thread(self._maker.prompt, number, arrival)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _send(
        self, number: int, arrival: Arrival, due: float, prompt: ReplayPrompt
    ) -> RequestOutcome:
        progress, request_id = self._progress, f"{self._name}-{number}"
        progress.sent += 1
        progress.cut += prompt.cut
        progress.lag_seconds = max(progress.lag_seconds, self._now() - due)
        times: list[float] = []
        end: End = "finished"
        reason = ""
        try:
            events = self._client.generate(
                token_ids=prompt.token_ids,
                max_tokens=prompt.output_tokens,
                ignore_eos=True,
                temperature=0.0,
                seed=number,
                request_id=request_id,
                deadline_seconds=self._deadline if arrival.deadline is None else arrival.deadline,
                tenant=arrival.tenant or None,
                priority=arrival.priority or None,
            )
            async with aclosing(events):
                async for event in events:
                    times.extend([self._now()] * len(event.token_ids))
                    progress.tokens += len(event.token_ids)
                    self._watch(progress)
        except JdisaggError as error:
            end, reason = ENDS_BY_STATUS.get(error.status, "failed"), error.message
            progress.failed += 1
        progress.ended += 1
        self._watch(progress)
        return RequestOutcome(
            request_id=request_id,
            arrival=due,
            finish=times[-1] if end == "finished" and times else self._now(),
            prompt_tokens=len(prompt.token_ids),
            output_tokens=len(times),
            first_token=times[0] if times else None,
            gaps=Gaps.of_times(times),
            end=end,
            tenant=arrival.tenant,
            reason=reason,
        )
