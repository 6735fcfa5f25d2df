"""A whole cluster on fake meshes in virtual time: workers, path and oracle, for tests of the path
and the workers.

`Cluster.check_quiet` is rule 6 of the design: when nothing runs, every page is free, every offer
released, every block gone."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from jdisagg.config import InstanceConfig, LimitsConfig, Mode, RoutingConfig
from jdisagg.costs.speeds import Kind
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.dispatch.token_stream import TextDelta
from jdisagg.engine.kept_here import KeptHere
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import (
    FinishReason,
    Request,
    SamplingParams,
    StreamEvent,
    Timings,
    TokenLogprobs,
    Usage,
)
from jdisagg.router.cluster_state import Description
from jdisagg.scheduler.executor import Executor, MeshLimits
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.residency import BlockNames
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.prefill_worker import PrefillWorker
from tests.fakes.fake_executor import Costs, FakeChannel, FakeExecutor, Faults, toy_limits
from tests.fakes.packed_ports import packed
from tests.fakes.toy_model import expected_scores, expected_tokens
from tests.fakes.virtual_time import VirtualClock


class ToyText:
    """Each token is one word `<id>`; a stop string is looked for in the newest token's word
    only."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = set(stop)
        self.stopped = False

    def push(self, token_ids: tuple[int, ...]) -> TextDelta:
        words: list[str] = []
        for kept, token_id in enumerate(token_ids):
            word = f"<{token_id}>"
            if word in self._stop:
                self.stopped = True
                return TextDelta("".join(words), kept + 1, True)
            words.append(word)
        return TextDelta("".join(words), len(token_ids), False)

    def finish(self) -> str:
        return ""


@dataclass
class Collected:
    """One request's stream, put together; asserts exactly once on the way."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def add(self, event: StreamEvent) -> None:
        assert self.usage is None, "nothing follows the last event"
        assert event.child not in self.finish, "nothing follows a child's end"
        if event.prompt_logprobs is not None:
            assert not self.tokens, "they come with the first event, and once"
            self.prompt_logprobs = event.prompt_logprobs
        tokens = self.tokens.setdefault(event.child, [])
        assert event.first_index == len(tokens), "each token once, in order"
        tokens += event.token_ids
        self.text[event.child] = self.text.get(event.child, "") + event.text
        self.logprobs.setdefault(event.child, []).extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish[event.child] = event.finish_reason
        self.usage, self.timings = event.usage, event.timings
        if event.usage is not None:
            assert event.usage.cached_by_tier is not None
            assert event.usage.cached_by_tier.total == event.usage.cached_tokens


class Cluster:
    """One prefill worker and one decode worker, or one mixed worker, behind a path. Use inside
    `run_virtually`."""

    def __init__(
        self,
        mode: Mode = Mode.DISAGGREGATED,
        decode: MeshLimits | None = None,
        prefill: MeshLimits | None = None,
        growth_tokens: int = 8,
        steps_per_dispatch: int = 1,
        queue_limit: int = 1024,
        limits: LimitsConfig | None = None,
        decode_faults: Faults | None = None,
        prefill_faults: Faults | None = None,
        costs: Costs | None = None,
        seed: int = 0,
        wire: bool = False,
        wrap_prefill: Callable[[PrefillPort], PrefillPort] = lambda port: port,
        events: RouterEvents = NO_ROUTER_EVENTS,
        wrap_decode: Callable[[DecodePort], DecodePort] = lambda port: port,
        wrap_peer: Callable[[PeerPort], PeerPort] = lambda port: port,
        wrap_mesh: Callable[[str, Executor], Executor] = lambda name, mesh: mesh,
        names: BlockNames | None = None,
        tiers: TierRoom | None = None,
        spills: TierRoom | None = None,
        appends: tuple[Kind, Kind] | None = None,
    ) -> None:
        """`wire`: every port call goes through the wire format and back. The wraps stand between
        path and workers, between workers, and between a worker and its mesh. `names`: KV stays for
        later requests, in other places too. `tiers`: of the prefill worker, `spills`: of the decode
        worker. `appends`: the path knows what they keep, and takes them to be of these
        kinds."""
        config = InstanceConfig(
            growth_tokens=growth_tokens,
            steps_per_dispatch=steps_per_dispatch,
            queue_limit=queue_limit,
        )
        self.mode = mode
        self.limits = limits or LimitsConfig()
        self.channel = FakeChannel()
        self.clock = VirtualClock()
        self._random = random.Random(seed)
        self.decode_mesh = FakeExecutor(decode or toy_limits(), self.channel, decode_faults, costs)
        self.prefill_mesh = FakeExecutor(
            prefill or toy_limits(), self.channel, prefill_faults, costs
        )
        self.prefill = PrefillWorker(
            WorkerContext(
                "prefill0", self.clock, self.new_id, names=names, tiers=tiers or TierRoom()
            ),
            wrap_mesh("prefill0", self.prefill_mesh),
            config,
            self.limits,
        )
        peer = wrap_peer(packed(PeerPort, self.prefill) if wire else self.prefill)
        peers: dict[str, PeerPort] = {"prefill0": peer} if mode is Mode.DISAGGREGATED else {}
        self.decode = DecodeWorker(
            WorkerContext(
                "decode0", self.clock, self.new_id, names=names, tiers=spills or TierRoom()
            ),
            wrap_mesh("decode0", self.decode_mesh),
            config,
            self.limits,
            peers,
            mode,
        )
        prefill_port: PrefillPort = packed(PrefillPort, self.prefill) if wire else self.prefill
        decode_port: DecodePort = packed(DecodePort, self.decode) if wire else self.decode
        prefills = {"prefill0": wrap_prefill(prefill_port)} if mode is Mode.DISAGGREGATED else {}
        affinity, routing = None, RoutingConfig(hold_seconds=1e9, local_gain=0.0)
        if appends is not None:
            assert names is not None, "else nothing is kept"
            affinity = KeptHere((self.prefill, self.decode), names.secret)
        self.path = RequestPath(
            ClusterPorts(prefills, {"decode0": wrap_decode(decode_port)}),
            lambda request: ToyText(request.sampling.stop),
            self.limits,
            self.clock,
            PlacerSettings(routing, affinity=affinity, events=events),
            self.new_id,
        )
        for worker, kind in zip((self.prefill, self.decode), appends or (), strict=False):
            state = self.path.placer.accounts.state
            state.describe(worker.name, Description("rack/host", kind))

    def new_id(self) -> int:
        return self._random.getrandbits(63)

    async def __aenter__(self) -> Self:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.decode.stop()
        await self.prefill.stop()

    async def collect(self, request: Request) -> Collected:
        collected = Collected()
        async for event in self.path.stream(request):
            collected.add(event)
        return collected

    async def check_quiet(self, settle_seconds: float = 1.0) -> None:
        """All pages free on all ranks, all offers and blocks gone, no hand-off left."""
        await asyncio.sleep(settle_seconds)
        for worker in (self.decode, self.prefill):
            status = await worker.status()
            assert status.free_pages == status.total_pages, f"{worker.name} holds pages: {status}"
            assert status.free_states == status.total_states, f"{worker.name} holds states"
            assert (status.running, status.waiting, status.handoffs) == (0, 0, 0), status
            assert (status.queued_tokens, status.queued_pairs, sum(status.rank_contexts)) == (
                0,
                0,
                0,
            ), status
        assert not self.channel.offered
        assert not self.decode_mesh.pulled

    def check_against_oracle(self, request: Request, collected: Collected) -> None:
        context_tokens = self.decode_mesh.limits.context_tokens
        for child in range(request.sampling.n):
            tokens, reason = expected_tokens(request, child, context_tokens)
            assert tuple(collected.tokens[child]) == tokens
            assert collected.finish[child].value == reason
        wanted = request.sampling.prompt_logprobs
        prompt = request.prompt_token_ids
        scores = None if wanted is None else expected_scores(prompt, wanted)
        assert collected.prompt_logprobs == scores
        assert collected.usage is not None
        assert collected.usage.completion_tokens == sum(
            len(tokens) for tokens in collected.tokens.values()
        )


def toy_request(
    number: int,
    prompt_tokens: int = 5,
    stop_ids: tuple[int, ...] = (),
    deadline_seconds: float | None = None,
    **sampling: object,
) -> Request:
    """A request with a prompt of its own; greedy unless told otherwise."""
    prompt = tuple((number * 37 + at * 11 + 1) % 89 for at in range(prompt_tokens))
    params = replace(SamplingParams(max_tokens=12, temperature=0.0), **sampling)  # type: ignore[arg-type]
    return Request(f"r{number}", prompt, params, stop_ids, deadline_seconds)
