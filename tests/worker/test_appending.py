"""A decode worker beside a prefill worker computes itself what it lacks of a prompt, over fake
meshes that check what lies in every page they read and that no chunk is larger than they append."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from jdisagg.errors import UnavailableError
from jdisagg.messages.ports import DecodePort, GenerateCall, Reservation, ReserveCall, Span
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.step_commands import DecodeSteps, PrefillChunk, StepCommand
from jdisagg.scheduler.executor import Executor
from tests.fakes.cluster import until
from tests.fakes.fake_states import with_state
from tests.worker.appends import APPEND, appending, cluster
from tests.worker.conversations import SEEDS, Talk, asked, limits, prompt, storm
from tests.worker.states import check_snapshots, stateful


class Commands:
    """What a mesh was given, in order."""

    def __init__(self) -> None:
        self.of: dict[str, list[StepCommand]] = {}

    def around(self, name: str, mesh: Executor) -> Executor:
        given, run = self.of.setdefault(name, []), mesh.run

        def recorded(command: StepCommand) -> object:
            given.append(command)
            return run(command)

        mesh.run = recorded  # type: ignore[method-assign, assignment]
        return mesh

    def chunks(self, name: str) -> list[PrefillChunk]:
        return [one for one in self.of[name] if isinstance(one, PrefillChunk)]


@SEEDS
@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "ranks"), [(4, 4, 1), (4, 8, 2), (32, 4, 1), (8, 16, 2)]
)
async def test_what_is_appended_changes_no_token(
    seed: int, prefill_size: int, decode_size: int, ranks: int
) -> None:
    """Random conversations, of which beginnings go to the prefill worker; some are cancelled."""
    commands = Commands()
    async with cluster(
        decode=appending(ranks, 640 // decode_size, decode_size),
        prefill=limits(ranks, 640 // prefill_size, prefill_size),
        wire=True,
        seed=seed,
        wrap_mesh=commands.around,
    ) as made:
        await storm(made, Talk(seed), requests=40, at_once=4, cancels=0.1)
        counters = made.decode.counters
        appended = counters["prompts_appended"]
        assert appended > made.path.counters["appends_handed_over"]
        assert 0 < counters["tokens_appended"] <= appended * APPEND
        assert made.path.counters.labelled()["placements", (("reason", "local"),)] >= appended
        longest = [len(row.tokens) for one in commands.chunks("prefill0") for row in one.rows]
        assert max(longest) > APPEND, "what is long is computed by the prefill worker"


async def test_where_pages_are_few_what_is_appended_is_preempted_and_goes_on_right() -> None:
    async with cluster(
        decode=appending(pages=46), prefill=limits(pages=64), growth_tokens=4, wire=True
    ) as made:
        await storm(made, Talk(7), requests=60, at_once=24)
        assert made.decode._state.preemptions > 0
        assert made.decode.counters["prompts_appended"] > 0


async def test_the_next_turn_is_appended_and_neither_computed_elsewhere_nor_sent() -> None:
    commands = Commands()
    async with cluster(wrap_mesh=commands.around) as made:
        first = await made.collect(asked(1, prompt(100)))
        computed, received = len(commands.chunks("prefill0")), made.decode.counters
        sent = received["kv_bytes_received"]
        history = prompt(100) + tuple(first.tokens[0])
        whole = (len(history) - 1) // 16 * 16
        second = asked(2, (*history, 7, 8, 9))
        collected = await made.ask(second)
        assert collected.cached_tokens == whole
        assert len(commands.chunks("prefill0")) == computed
        assert received["kv_bytes_received"] == sent
        (chunk,) = commands.chunks("decode0")
        assert [(row.start, len(row.tokens)) for row in chunk.rows] == [
            (whole, len(history) + 3 - whole)
        ]
        status = await made.decode.status()
        assert status.can_prefill and status.chunk_tokens == APPEND


class Forgetful:
    """The decode worker loses what it keeps before the reservations that will compute."""

    def __init__(self) -> None:
        self.forget: Callable[[], object] = lambda: None
        self.times = 0

    async def reserve(
        self, proceed: Callable[[ReserveCall], Awaitable[Reservation]], call: ReserveCall
    ) -> Reservation:
        if call.computes:
            self.forget()
            self.times += 1
        return await proceed(call)


async def test_what_is_not_kept_any_more_is_computed_by_the_prefill_worker() -> None:
    """The router could not know: running streams would wait for the whole prompt."""
    commands, forgetful = Commands(), Forgetful()
    async with cluster(
        wrap_mesh=commands.around, wrap_decode=lambda port: through(DecodePort, port, forgetful)
    ) as made:
        first = await made.collect(asked(1, prompt(100)))
        forgetful.forget = made.decode._kept.clear
        second = asked(2, (*prompt(100), *first.tokens[0], 7, 8, 9))
        await made.ask(second)
        assert forgetful.times == 1, "it was to be appended"
        assert made.path.counters["appends_handed_over"] == 1
        assert not commands.chunks("decode0")
        assert made.decode.counters["prompts_appended"] == 0


class FailsOnce:
    """The decode worker is gone as it begins to compute a prompt, and comes back."""

    def __init__(self) -> None:
        self.failed = 0

    async def generate(
        self, proceed: Callable[[GenerateCall], AsyncIterator[Span]], call: GenerateCall
    ) -> AsyncIterator[Span]:
        spans = proceed(call)
        if call.source is None and not self.failed:
            self.failed += 1
            await anext(spans)
            raise UnavailableError("the connection broke")
        async for span in spans:
            yield span


async def test_an_attempt_to_append_that_fails_is_followed_by_another() -> None:
    fails = FailsOnce()
    async with cluster(wrap_decode=lambda port: through(DecodePort, port, fails)) as made:
        first = await made.collect(asked(1, prompt(100)))
        second = asked(2, (*prompt(100), *first.tokens[0], 7, 8, 9))
        await made.ask(second)
        assert fails.failed == 1 and made.path.counters["attempts_failed"] == 1


async def test_streams_get_a_token_between_any_two_chunks_that_are_appended() -> None:
    """Four prompts come at once to a mesh where sequences run; each fills a chunk."""
    commands = Commands()
    async with cluster(wrap_mesh=commands.around, decode=appending(pages=300)) as made:
        rng = random.Random(5)
        beginnings = [tuple(rng.randrange(89) for _ in range(48)) for _ in range(4)]
        for number, ids in enumerate(beginnings):
            await made.collect(asked(number, ids))
        long = asked(9, prompt(40), 100)
        running = asyncio.ensure_future(made.collect(long))
        await until(lambda: any(made.decode._state.running), 0.01)
        told = [asked(20 + at, (*ids, *range(20))) for at, ids in enumerate(beginnings)]
        for request, one in zip(told, await asyncio.gather(*map(made.collect, told)), strict=True):
            made.check(request, one)
        assert not running.done(), "it ran all the while"
        assert made.decode.counters["prompts_appended"] == 4
        kinds = [
            type(one)
            for one in commands.of["decode0"]
            if isinstance(one, (PrefillChunk, DecodeSteps))
        ]
        assert kinds.count(PrefillChunk) == 4
        assert (PrefillChunk, PrefillChunk) not in set(zip(kinds, kinds[1:], strict=False))
        made.check(long, await running)


@SEEDS
@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_is_appended_to_a_snapshot_changes_no_token(seed: int, ranks: int) -> None:
    """From a snapshot that it made at the last whole block of an answer."""
    decode = with_state(appending(ranks), snapshots=24, every=16)
    async with cluster(decode=decode, prefill=stateful(ranks), wire=True, seed=seed) as made:
        await storm(made, Talk(seed), requests=60, at_once=4, cancels=0.1)
        assert made.decode.counters["prompts_appended"] > 0
        assert check_snapshots(made) > 0
        assert sum(one.used for one in made.decode._state.residency.snapshots) > 0
