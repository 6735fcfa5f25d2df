"""Runs a router process.

The router serves requests, registers workers and reports readiness. It sends canaries, which are
small test requests. It also runs the elastic controller, which advises on changes of workers'
roles. `launch.router` reads the flags."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from jdisagg.chat.formats import AnswerFormat
from jdisagg.clock import Clock, MonotonicClock
from jdisagg.config import LimitsConfig, Mode, RoutingConfig, ServiceConfig
from jdisagg.dispatch.client_limits import KeyUse
from jdisagg.dispatch.frontend import Frontend, ServingPath
from jdisagg.dispatch.ids import random_id
from jdisagg.dispatch.membership import Membership, WorkerPorts, cluster_ports
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.prompts import ChatTokenizer, ModelInfo
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.roles.elastic_pools import ElasticPools
from jdisagg.dispatch.roles.outcomes import OutcomeTap
from jdisagg.dispatch.roles.role_switcher import RoleSwitcher
from jdisagg.dispatch.served_adapters import CheckAdapter, ServedAdapters
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.dispatch.weights_control import WeightsControl
from jdisagg.errors import UnavailableError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.registry import WorkerCard
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.serving import page_sources, where
from jdisagg.node.signals import StopSignals
from jdisagg.observe import wrap
from jdisagg.observe.canary import Canary, CanaryRunner, Pair, Readiness
from jdisagg.observe.canary_probe import PortProbe, pairs_of
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.observe.logs import say
from jdisagg.observe.observer import Observer
from jdisagg.router.decision import NoRouterEvents, RouterEvents, RouterEventsList
from jdisagg.router.elastic import Controller, ElasticConfig
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.service.internal.registry import registry_service
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.service.internal.role_services import cluster_roles_service, worker_roles
from jdisagg.service.server import GenerationServer, block_secret, cluster_credentials, read_tokens
from jdisagg.spending import Spending

# Context length before the first worker registers. Until then, all requests are refused.
_UNKNOWN_CONTEXT = 1 << 24
# Intervals between canaries without a success after which the router is no longer ready. It is
# several, because the first canary may wait for compilation.
CANARY_PATIENCE = 4.0


class RouterTokenizer(ChatTokenizer, Protocol):
    @property
    def vocabulary(self) -> int: ...


@dataclass(frozen=True)
class RouterConfig:
    """Configuration of a router.

    Attributes:
        limits: Bounds and time limits of requests.
        routing: Placement and admission of requests.
        service: Addresses and credentials of the router.
        elastic: Thresholds of the elastic controller, which advises on role changes.
        changes_roles: Whether the router acts on the controller's advice.
        canary_seconds: Seconds between canaries, which are small requests that test the transfer of
            KV. 0 disables canaries. Readiness then does not depend on KV transfers.
        log_requests: Whether to log one line for each request.
    """

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    changes_roles: bool = False
    canary_seconds: float = 5.0
    log_requests: bool = False


class Router:
    """A router process. The constructor must run on the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: RouterTokenizer,
        name: str,
        observer: Observer | None = None,
        decisions: DecisionLog | None = None,
        grammars: GrammarCompiler | None = None,
        check_adapter: CheckAdapter | None = None,
    ) -> None:
        self._config = config
        self._check_adapter = check_adapter
        self._grammars = grammars
        self._decisions = decisions
        self._clock = MonotonicClock()
        self._name = name
        self._tokenizer = tokenizer
        self._observer = observer
        self._credentials = cluster_credentials(config.service)
        self._changed = asyncio.Event()
        self._canary: CanaryRunner | None = None

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then waits for running requests and returns. A second
        signal ends the wait."""
        observer, limits, service = self._observer, self._config.limits, self._config.service
        known, routing = KnownBlocks(block_secret(service)), self._config.routing
        spending = Spending(random_id())
        membership = Membership(
            self._clock,
            wrap.ports(self._open_ports, observer),
            limits.timeouts.membership,
            on_change=self._changed.set,
            known=known,
        )
        seconds = self._config.canary_seconds
        canary = Canary(CANARY_PATIENCE * seconds) if seconds else None
        path = RequestPath(
            cluster_ports(membership),
            lambda request: TokenStream.of(self._tokenizer, request),
            limits,
            self._clock,
            PlacerSettings(
                replace(routing, peer_fetch=routing.peer_fetch is not False),
                affinity=known,
                events=RouterEventsList(*self._listeners(canary)),
                spending=spending,
            ),
        )
        if canary:
            self._start_canary(membership, canary)
        controller, elastic = self._elastic(membership, path)
        if observer:
            observer.metrics.watch_counters("path", path.counters)
            observer.metrics.watch_cluster(path.status)
            observer.metrics.model = self._name
        outcomes = OutcomeTap(self._clock, controller.outcome)
        frontend = self._frontend(path, outcomes, self._model_info(membership))
        frontend.key_use = KeyUse(spending)
        weights = frontend.weights = WeightsControl(path, self._clock, path.counters)
        tokens = read_tokens(service.cluster_token_file)
        server = GenerationServer(
            frontend,
            service,
            [
                registry_service(
                    membership,
                    tokens,
                    self._reach,
                    lambda uses: path.placer.lengths.exchange(
                        uses, spending.exchange(uses, self._clock.now(), len(membership.cards()))
                    ),
                ),
                cluster_roles_service(elastic, tokens),
            ],
            wrap.request_log(self._config.log_requests, observer, lambda: path.placer.waiting),
            observer.metrics.scrape if observer else None,
            page_sources(observer),
        )
        signals = StopSignals(server.force)
        await server.start()
        await server.set_ready(False)
        watching = asyncio.create_task(self._watch(membership, server, frontend))
        renewing = asyncio.create_task(self._renew(weights))
        elastic.start()
        say(f"jdisagg router listens on {where(server.listens)}")
        try:
            await signals.first()
            await server.drain()
        finally:
            await elastic.stop()
            for task in (watching, renewing):
                task.cancel()
            await asyncio.gather(watching, renewing, return_exceptions=True)
            if self._canary:
                await self._canary.stop()
            membership.close()

    def _frontend(self, path: RequestPath, outcomes: OutcomeTap, info: ModelInfo) -> Frontend:
        tokenizer, service = self._tokenizer, self._config.service
        frontend = Frontend(
            through(ServingPath, wrap.path(path, self._observer), outcomes),
            tokenizer,
            info,
            self._config.limits,
            path.routing,
            self._grammars,
            AnswerFormat.of(tokenizer.chat_template, service.tool_parser, service.reasoning_parser),
        )
        path.read_images_with(frontend.prompts.images.pixels)
        frontend.adapters = ServedAdapters(self._check_adapter, path.status)
        frontend.adapters.name_all(service.lora_modules)
        return frontend

    def _elastic(
        self, membership: Membership, path: RequestPath
    ) -> tuple[Controller, ElasticPools]:
        controller = Controller(self._config.elastic)
        switcher = RoleSwitcher(
            membership,
            lambda address: worker_roles(
                address, self._credentials, self._config.limits.timeouts.call
            ),
            self._clock,
            random_id,
            self._config.limits.timeouts.membership,
        )
        pools = ElasticPools(
            controller,
            switcher,
            membership.statuses,
            self._clock,
            self._config.changes_roles,
            say,
            lambda: path.placer.waiting,
        )
        if self._observer:
            self._observer.metrics.watch_counters("roles", switcher.counters)
            self._observer.metrics.watch_advice(pools.latest_advice)
        return controller, pools

    def _listeners(self, canary: Canary | None) -> list[RouterEvents]:
        observed = [self._observer.metrics] if self._observer else []
        logged = [self._decisions] if self._decisions else []
        # Successful hand-offs of client requests count as canaries, because a canary may be late if
        # all workers are busy.
        proved = [_HandoversSeen(canary, self._clock)] if canary else []
        return [*observed, *logged, *proved]

    def _start_canary(self, membership: Membership, canary: Canary) -> None:
        seconds, times = self._config.canary_seconds, self._config.limits.timeouts.process

        async def pairs() -> tuple[Pair, ...]:
            return pairs_of(membership.statuses())

        def changed(readiness: Readiness) -> None:
            self._changed.set()
            say(f"canary: {readiness.reason}")

        probe = PortProbe(
            membership.prefill,
            membership.decode,
            random_id,
            times.canary_seconds,
            membership.address,
        )
        self._canary = CanaryRunner(
            probe, pairs, self._clock, canary, seconds, times.canary_seconds, changed
        )
        self._canary.start()
        if self._observer:
            self._observer.metrics.watch_canary(canary, self._clock.now)

    async def _watch(
        self, membership: Membership, server: GenerationServer, frontend: Frontend
    ) -> None:
        ready, said, times = False, "", self._config.limits.timeouts.membership
        due = self._clock.now()
        while True:
            absent_seconds = self._clock.now() - due
            if absent_seconds > times.absent_seconds:
                membership.excuse(absent_seconds)
            for card in membership.sweep():
                say(
                    f"worker {card.name} at {card.address} is silent: ignored until it registers"
                    " again"
                )
            if self._changed.is_set():
                self._changed.clear()
                frontend.model = self._model_info(membership)
                known = (
                    ", ".join(
                        sorted(
                            f"{card.name} ({card.role.value} {card.layout})"
                            for card in membership.cards()
                        )
                    )
                    or "none"
                )
                if known != said:
                    say(f"workers: {known}")
                    said = known
            if self._is_ready(membership) is not ready:
                ready = not ready
                await server.set_ready(ready)
                say("ready" if ready else "not ready")
            due = self._clock.now() + times.sweep_seconds
            try:
                await asyncio.wait_for(self._changed.wait(), times.sweep_seconds)
            except TimeoutError:
                continue

    async def _renew(self, weights: WeightsControl) -> None:
        while True:
            await asyncio.sleep(self._config.limits.timeouts.membership.heartbeat_seconds)
            await weights.catch_up()

    def _is_ready(self, membership: Membership) -> bool:
        return membership.ready and (self._canary is None or self._canary.readiness().ready)

    def _model_info(self, membership: Membership) -> ModelInfo:
        model, tokenizer = membership.model, self._tokenizer
        named = self._config.service.served_model_name
        cards = sorted(membership.cards(), key=lambda card: card.name)
        prefill = [card.layout for card in cards if card.role is WorkerRole.PREFILL]
        decode = [card.layout for card in cards if card.role is not WorkerRole.PREFILL]
        mixed = any(card.role is WorkerRole.MIXED for card in cards)
        return ModelInfo(
            name=named or (model.name if model else self._name),
            family=model.family if model else "",
            vocabulary=model.vocabulary if model else tokenizer.vocabulary,
            context_tokens=model.context_tokens if model else _UNKNOWN_CONTEXT,
            dtype=model.dtype if model else "float32",
            mode=Mode.CHUNKED if mixed and not prefill else Mode.DISAGGREGATED,
            prefill_layout=prefill[0] if prefill else None,
            decode_layout=decode[0] if decode else Layout(),
            kv_bytes_per_token=model.kv_bytes_per_token if model else 0,
            version=model.fingerprint if model else "",
            sampling=tokenizer.sampling_defaults,
        )

    def _open_ports(self, card: WorkerCard) -> WorkerPorts:
        worker = RemoteWorker(
            card.address, self._credentials, card.boot_id, self._config.limits.timeouts.call
        )
        if card.role is WorkerRole.PREFILL:
            return WorkerPorts(worker.prefill, None, worker.close, worker.weights)
        return WorkerPorts(None, worker.decode, worker.close, worker.weights)

    async def _reach(self, card: WorkerCard) -> None:
        ports, seconds = self._open_ports(card), self._config.limits.timeouts.membership
        port = ports.prefill or ports.decode
        assert port is not None
        try:
            async with asyncio.timeout(seconds.reach_seconds):
                await port.status()
        except TimeoutError:
            raise UnavailableError(
                f"it did not answer within {seconds.reach_seconds:g} s"
            ) from None
        finally:
            ports.close()


class _HandoversSeen(NoRouterEvents):
    def __init__(self, canary: Canary, clock: Clock) -> None:
        self._canary = canary
        self._clock = clock

    def handed_over(self, prefill: str | None, decode: str) -> None:
        self._canary.succeeded(Pair(prefill or "", decode), self._clock.now())
