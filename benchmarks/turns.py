"""Measures the first and second token of a conversation's second turn for each way of computing it,
and checks whether the router chooses the fastest.

    python -m benchmarks.turns --name=turns

The cluster is embedded, with one device per mesh, the measured model in float32, and prefix caches.
The prefill mesh computes the first turn of a conversation; the prompt and the answer remain on the
decode mesh. The second turn is computed in one of these ways:
- recompute: the prefill worker has nothing cached and computes all tokens;
- reuse: the prefill worker has the first prompt cached, and computes the answer and the new tokens;
- fetch: the prefill worker has nothing cached, and fetches prompt and answer from the decode
  worker;
- append: the decode worker computes the new tokens itself;
- router, forgotten: the router chooses, and the prefill worker has nothing cached;
- router, kept: the router chooses, and the prefill worker has the first prompt cached.
The first three transfer only what the decode worker lacks. The router uses the prices that the
workers measured at their start, corrected by its own requests. All ways use the same first turn,
each with different new tokens, in an order that changes with each round. The first round is not
counted. "busy": two other streams run on the decode mesh, and the table has the longest gap between
two of their tokens.

A request of the router counts as one more sample of the way that it took. "of the best": the median
of the chosen way divided by that of the fastest possible way. The table also has the processor
seconds until the first token, which depend less on the load of the machine. The router's choice
also considers the second token and the delay of other streams. "first token and delay of others"
adds to the first token, for each of the streams beside it, by how much their longest gap exceeds
that of the way with the shortest."""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import jax
import msgspec
import numpy as np
from absl import app, flags

from benchmarks import plain_loop
from benchmarks.measure import save
from benchmarks.measured_model import NoText, load
from jdisagg.assembly import LocalAffinity
from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig, PrefixConfig, RoutingConfig
from jdisagg.costs.speeds import Kind
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import HandoffSource, PrefillCall, PrefillPort, PrefillReply
from jdisagg.messages.ports_middleware import through
from jdisagg.request import Request, SamplingParams
from jdisagg.router.cluster_state import Description
from jdisagg.router.predictor import LearnedCorrections
from models.catalog import read_config
from models.hf_config import HfConfig

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measured rounds: a conversation each way and cell.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

CONTEXT, ANSWER, APPEND = 2304, 17, 256
Key = tuple[str, int, int, int]  # way, tokens of the first prompt, new ones, busy
CELLS = ((512, 32, 0), (1024, 32, 0), (1024, 200, 0), (1024, 200, 1))
FORGOTTEN, KEPT = ("recompute", "fetch", "append"), ("reuse", "append")
ROUTED = {"router, forgotten": FORGOTTEN, "router, kept": KEPT}
WAYS = ("recompute", "reuse", "fetch", "append")
BESIDE = 2  # streams beside busy turns
WEIGHED = "first token and delay of others"
# those that find the first prompt kept by the prefill worker, and those that do not
ROTATED = (
    (("reuse", "router, kept"), ("append", "fetch", "router, forgotten")),
    (("router, kept", "reuse"), ("router, forgotten", "fetch", "append")),
)


class FromDecode:
    """Middleware of the prefill port that has the prefill worker fetch, for each prompt, all that
    the decode worker has cached."""

    def __init__(self, new_id: Callable[[], int], affinity: LocalAffinity) -> None:
        self._new_id, self._affinity = new_id, affinity

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        known = self._affinity.known(call.request)().get(DECODE, 0)
        hint = HandoffSource(DECODE, self._new_id())
        return await proceed(msgspec.structs.replace(call, peer=hint, peer_tokens=known))


class ByWay(EmbeddedCluster):
    """A cluster whose prefill worker may fetch from its decode worker. `ways`: one request path
    over the same workers for each way, which limits the router to this way."""

    def _make_ports(self) -> ClusterPorts:
        ports = self.ports = super()._make_ports()
        prefill = self._workers[0]
        assert not prefill.role.decodes
        prefill._sources = prefill._find_sources(True)
        return ports

    def open_ways(self) -> None:
        prefill, decode = self._workers
        assert self._names is not None
        plain, told = PlacerSettings(), LocalAffinity((prefill, decode), self._names.secret)
        from_decode = FromDecode(prefill._context.ids, told)
        hinted = through(PrefillPort, self.ports.prefill[PREFILL], from_decode)
        fetching = ClusterPorts({PREFILL: hinted}, self.ports.decode)
        priced = RoutingConfig(hold_seconds=1e9, peer_fetch=True)
        self.ways = {
            "recompute": self._path(self.ports, plain),
            "reuse": self._path(self.ports, plain),
            "fetch": self._path(fetching, plain),
            "append": self._path(
                ClusterPorts({}, self.ports.decode), PlacerSettings(affinity=told)
            ),
            **{
                name: self._path(self.ports, PlacerSettings(priced, affinity=told))
                for name in ROUTED
            },
        }
        shape = read_config(HfConfig(plain_loop.MEASURED_MODEL, "measured")).cost_geometry(
            "measured"
        )
        learned = LearnedCorrections()  # as of one router
        for name in ROUTED:
            self.ways[name].placer._corrections = learned
            state = self.ways[name].placer.accounts.state
            kind = Kind(shape, Layout(), None, dtype="float32")
            for worker in (PREFILL, DECODE):
                state.describe(worker, Description("here/here/here/here", kind))

    def _path(self, ports: ClusterPorts, settings: PlacerSettings) -> RequestPath:
        return RequestPath(
            ports,
            lambda request: TokenStream.of(NoText(), request),
            self.config.limits,
            self.clock,
            settings,
        )


def cluster() -> ByWay:
    instance = InstanceConfig(
        layout=Layout(), slots_per_rank=4, growth_tokens=64, min_chunk_tokens=64, pages_per_rank=160
    )
    config = EngineConfig(
        model=ModelConfig(context_tokens=CONTEXT),
        prefill=instance,
        decode=instance,
        prefix=PrefixConfig(True, restores="always", append_tokens=APPEND),
    )
    return ByWay(config, load, NoText(), jax.devices())


class Conversations:
    """Sends conversations, and stores the measurements by (way, first prompt, new tokens, busy)."""

    def __init__(self, made: ByWay) -> None:
        self.cluster = made
        self.first: dict[Key, list[float]] = {}
        self.second: dict[Key, list[float]] = {}
        self.processors: dict[Key, list[float]] = {}
        self.gaps: dict[Key, list[float]] = {}
        self.taken: dict[Key, list[str]] = {}
        self.said: dict[Key, str] = {}
        self.errors: list[float] = []  # relative, of predicted first tokens, in order
        self._rng = np.random.default_rng(0)
        self._numbers = itertools.count()

    def _words(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(3, plain_loop.VOCABULARY, tokens).tolist())

    def _request(self, prompt: tuple[int, ...], tokens: int) -> Request:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Request(f"r{next(self._numbers)}", prompt, params)

    async def _ask(
        self, path: RequestPath, prompt: tuple[int, ...], tokens: int
    ) -> tuple[list[float], list[int]]:
        """Returns the seconds to each token, and the tokens. The last entry of the seconds is the
        processor seconds until the first token."""
        began, times, answer = time.perf_counter(), [], []
        used, until_first = time.process_time(), 0.0
        async for event in path.stream(self._request(prompt, tokens)):
            if event.token_ids and not answer:
                until_first = time.process_time() - used
            times += [time.perf_counter() - began] * len(event.token_ids)
            answer += event.token_ids
        return [*times, until_first], answer

    @asynccontextmanager
    async def _streams(self, count: int) -> AsyncIterator[list[list[float]]]:
        """Runs `count` other streams on the decode mesh. Returns the time of each token."""
        times: list[list[float]] = [[] for _ in range(count)]

        async def run(at: int, prompt: tuple[int, ...]) -> None:
            async for event in self.cluster.ways["reuse"].stream(self._request(prompt, 1500)):
                times[at] += [time.perf_counter()] * len(event.token_ids)

        tasks = [asyncio.create_task(run(at, self._words(64))) for at in range(count)]
        while any(len(seen) < 3 for seen in times):
            await asyncio.sleep(0.01)
        try:
            yield times
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def cell(self, first_tokens: int, new_tokens: int, busy: int, order: int) -> None:
        """Runs one first turn, and a separate second turn for each way. `order` rotates the
        ways."""
        prompt = self._words(first_tokens)
        _, answer = await self._ask(self.cluster.ways["reuse"], prompt, ANSWER)
        history = (*prompt, *answer)
        # who recomputes all is last of those that find it forgotten, and leaves it to the others
        kept = [*ROTATED[order % 2][0]]
        forgotten = [*ROTATED[order % 2][1], "recompute"]
        for way in kept + forgotten if order % 2 else forgotten + kept:
            if way != "append" or ANSWER - 1 + new_tokens <= APPEND:
                if way in forgotten:
                    self.cluster._workers[0]._kept.clear()
                await self._second(way, history, (way, first_tokens, new_tokens, busy))
        for worker in self.cluster._workers:
            worker._kept.clear()

    async def _second(self, way: str, history: tuple[int, ...], key: Key) -> None:
        _, _, new_tokens, busy = key
        path, second = self.cluster.ways[way], (*history, *self._words(new_tokens))
        async with self._streams(BESIDE * busy) as others:
            began = time.perf_counter()
            times, _ = await self._ask(path, second, 4)
            ended = time.perf_counter()
            gaps = [
                later - earlier
                for seen in others
                for earlier, later in itertools.pairwise(seen)
                if began <= later <= ended
            ]
        said = path.placer.status().decisions[0]
        taken = "append" if not said.prefill else "fetch" if "fetches" in said.reason else "prefill"
        if way in ROUTED:
            assert said.predicted_ttft_seconds and said.ttft_seconds, "prices are measured"
            self.errors.append(said.predicted_ttft_seconds / said.ttft_seconds - 1)
            taken = ROUTED[way][0] if taken == "prefill" else taken
            self.taken.setdefault(key, []).append(taken)
            self.said[key] = said.reason
            key = (taken, *key[1:])  # one more that went that way
        assert way in ROUTED or taken == (
            "prefill" if way in ("recompute", "reuse", "fetch") else way
        )
        for of, seconds in (
            (self.first, times[0]),
            (self.second, times[1]),
            (self.processors, times[-1]),
            (self.gaps, max(gaps, default=0.0)),
        ):
            of.setdefault(key, []).append(seconds)

    def forget(self) -> None:
        for of in (self.first, self.second, self.processors, self.gaps, self.taken):
            of.clear()


def figures_of(talk: Conversations) -> dict[str, object]:
    rows: dict[str, object] = {}
    measures = {
        "first token": talk.first,
        "second token": talk.second,
        "processors until the first token": talk.processors,
    }
    ratios: dict[str, list[float]] = {name: [] for name in (*measures, WEIGHED)}
    for cell in CELLS:
        ways = [way for way in WAYS if (way, *cell) in talk.first]
        row: dict[str, object] = {}
        for way in ways:
            key = (way, *cell)
            row[way] = {
                "times": len(talk.first[key]),
                **{
                    f"{name}, ms": round(1e3 * statistics.median(of[key]), 1)
                    for name, of in {**measures, "longest gap of others": talk.gaps}.items()
                },
            }
        for routed, among in ROUTED.items():
            taken, key = talk.taken[routed, *cell], (routed, *cell)
            row[routed] = {
                "taken": {one: taken.count(one) for one in dict.fromkeys(taken)},
                "its reason": talk.said[key],
            }
            for name, of in measures.items():
                medians = {one: statistics.median(of[one, *cell]) for one in among if one in ways}
                ratios[name] += [medians[one] / min(medians.values()) for one in taken]
            gaps = {one: statistics.median(talk.gaps[one, *cell]) for one in among if one in ways}
            medians = {
                one: statistics.median(talk.first[one, *cell])
                + BESIDE * cell[2] * (gap - min(gaps.values()))
                for one, gap in gaps.items()
            }
            ratios[WEIGHED] += [medians[one] / min(medians.values()) for one in taken]
        first, new, busy = cell
        rows[f"{first} + {new} tokens, {'busy' if busy else 'idle'}"] = row
    later = [abs(error) for error in talk.errors[20:]]
    return {
        "error of predicted first tokens after 20 requests, median": (
            round(statistics.median(later), 3) if later else None
        ),
        "of the best, within 10 %": {
            name: round(sum(one <= 1.1 for one in of) / len(of), 3) for name, of in ratios.items()
        },
        "of the best, worst": {name: round(max(of), 3) for name, of in ratios.items()},
        "rows": rows,
    }


async def measure() -> dict[str, object]:
    made = cluster()
    await made.start()
    times = {replica.executor.name: msgspec.to_builtins(replica.times) for replica in made.replicas}
    print(f"measured: {times}", flush=True)
    made.open_ways()
    talk = Conversations(made)
    try:
        for number in range(1 + _ROUNDS.value):
            if number == 1:
                talk.forget()
            for first, new, busy in CELLS:
                await talk.cell(first, new, busy, number)
            print(f"round {number} of {_ROUNDS.value}", flush=True)
    finally:
        await made.stop()
    found = figures_of(talk)
    for name, value in found.items():
        print(f"{name}: {value}" if name != "rows" else "", flush=True)
    for name, row in found["rows"].items():  # type: ignore[attr-defined]
        print(f"{name}: {row}", flush=True)
    counters: dict[str, object] = {
        worker.name: dict(worker.counters.snapshot()) for worker in made._workers
    }
    return {"rounds": _ROUNDS.value, "measured": times, **found, "counters": counters}


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    use_compilation_cache("~/.cache/jdisagg/xla")
    figures = asyncio.run(measure())
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
