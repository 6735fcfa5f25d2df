"""The elastic controller: decides which worker should change its role, and advises how many workers
of each role an autoscaler should run. Does no I/O.

A pool is the set of all workers of one role. A pool is short of workers if it is the reason why
requests miss the latency objective, or if it is full. A missed TTFT is attributed to a pool only if
queueing alone explains it. A missed TPOT is attributed to decode, as long as a smaller batch could
help. An empty pool is always short, and the other pool then gives a worker even if it is short
itself.

A switch is a change of one worker's role. A fluid model estimates the share of requests that meet
the objective, with and without a switch: the smaller of both pools' min(1, workers / need). The
gain of a switch is

    gain = rate * (horizon * (after - now) - switch_seconds * (now - meanwhile)) - harm of moving
        the running sequences

The gain must exceed `LEAST_GAIN` of the horizon's requests. The formula thus charges the time for
draining, re-sharding the weights and warm-up. A switch that would make the other pool short is not
made.

The advice follows the load that is offered to a pool: the workers that were busy, more if the
requests that wait became more and less if they became fewer, divided by the utilization that a pool
should have. So a pool grows before it is short, and not again while it only works off what waited
before. A pool that is short in spite of it gets one more worker, and no other before its
observations are new.

Hysteresis: a switch requires that a pool is short for `patience_seconds`, and so does the advice of
more workers. The advice of fewer is the largest number that was needed in the last `calm_seconds`.
After a switch no other switch is made for
`cooldown_seconds`, and earlier observations are discarded. The model may be wrong. So that a
mistake is not repeated, a pool that was short with n workers is not reduced to n workers under a
similar load for `REMEMBER_SECONDS`. Without traffic there is no switch. If only one worker of a
role takes requests, it keeps its role."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from msgspec import Meta

from jdisagg.errors import InvalidRequestError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.elastic_signals import EndedRequest, PoolView, SloTarget, SloWindow, View
from jdisagg.settings.declared import Count, NotNegative, Positive, Settings

ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE)
# A load above this share of an earlier load counts as similar, as use is not proportional to load.
LIKE_LOAD = 0.75
# Upper bound of a pool's need, relative to its size. Larger values come from the worst moments of a
# queue.
MOST_OVER = 2.0
# Peak utilization (`PoolView.peak_use`) above which a pool is short of workers.
FULL_USE = 0.95
# A pool shrinks only to a size at which its use would be at most this part of the wanted use, so
# that a load near the border of two sizes does not make it grow and shrink in turn.
SHRINK_USE = 0.85
# Share of the horizon's requests that a switch must gain.
LEAST_GAIN = 0.02
# For this long a pool that was short of workers does not give one away at a similar load.
REMEMBER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ElasticConfig(Settings):
    """Settings of the elastic controller.

    Attributes:
        slo: Objective of the latencies.
        window_seconds: Length of the observation window.
        interval_seconds: Time between two decisions.
        patience_seconds: Time for which a pool must be short of workers before a switch.
        calm_seconds: Time over which the largest need of a pool is advised.
        cooldown_seconds: Time after a switch without another one.
        horizon_seconds: Time over which the gain of a switch is counted.
        target_use: Mean utilization that a pool should have, in [0, 1].
        least_requests: Least number of ended requests in the observation window. If there are
            fewer, their latencies are ignored.
        move_harm: Cost of migrating one running request, as a number of requests that miss the
            objective.
        switch_seconds: Assumed duration of a role change until one has been observed.
        least_prefill: Number of prefill workers that remain.
        least_decode: Number of decode workers that remain.
    """

    section: ClassVar[str] = "elastic"
    slo: SloTarget = field(default_factory=SloTarget)
    window_seconds: Positive = 60.0
    interval_seconds: Positive = 1.0
    patience_seconds: NotNegative = 10.0
    calm_seconds: NotNegative = 300.0
    cooldown_seconds: NotNegative = 60.0
    horizon_seconds: Positive = 600.0
    switch_seconds: Positive = 30.0
    target_use: Annotated[float, Meta(gt=0, le=FULL_USE)] = 0.8
    least_requests: Count = 8
    move_harm: NotNegative = 0.1
    least_prefill: Count = 1
    least_decode: Count = 1

    def least(self, role: WorkerRole) -> int:
        return self.least_prefill if role is WorkerRole.PREFILL else self.least_decode


@dataclass(frozen=True, slots=True)
class Switch:
    """A proposed role change: worker `name` should take `role` in `layout`. `gain` is the number of
    additional requests within the horizon that meet the objective."""

    name: str
    role: WorkerRole
    layout: Layout
    gain: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Number of workers that each role should have. `prefill_need` and `decode_need` are the
    estimated needs before rounding."""

    prefill: int
    decode: int
    prefill_need: float
    decode_need: float
    reason: str


@dataclass(frozen=True, slots=True)
class WasShort:
    """Records that a pool of `size` workers was too small at time `at`. `load` is the pool's load
    at that time, as a number of workers."""

    size: int
    load: float
    at: float


Needs = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """State that the controller keeps between decisions.

    Attributes:
        short_since: For each role, prefill first, the time since when its pool has been short of
            workers; None if it is not short.
        over_since: For each role, the time since when its pool has needed more workers than it has;
            None if it does not.
        needed: For each role, its pool's needs of the last `calm_seconds` that no later need
            reached, as (time, number of workers). A need beyond the size counts once it lasts.
        needed_since: Time of the first need. None if there is none.
        grew_at: For each role, when its pool last got a worker.
        sizes: For each role, the size of its pool.
        was_short: For each role, when and with which size its pool was last short; None if it was
            not short recently.
    """

    short_since: tuple[float | None, float | None] = (None, None)
    over_since: tuple[float | None, float | None] = (None, None)
    needed: tuple[Needs, Needs] = ((), ())
    needed_since: float | None = None
    grew_at: tuple[float, float] = (-math.inf, -math.inf)
    sizes: tuple[int, int] = (0, 0)
    was_short: tuple[WasShort | None, WasShort | None] = (None, None)
    quiet_until: float = -math.inf
    switching: str | None = None
    switch_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a decision. `switch` is None if no role should change now."""

    switch: Switch | None
    advice: Advice
    reason: str
    memory: Memory


@dataclass(frozen=True, slots=True)
class _Pool:
    role: WorkerRole
    view: PoolView
    short: str
    load: float
    need: float

    @property
    def size(self) -> int:
        return len(self.view.taking)


def decide(config: ElasticConfig, memory: Memory, view: View, may_switch: bool = True) -> Verdict:
    """Decides on a switch and gives advice, based on the observations `view`. If `may_switch` is
    False, the result has no switch."""
    pools = (_prefill(config, view), _decode(config, view))
    memory = replace(
        memory,
        short_since=_since(memory.short_since, tuple(bool(pool.short) for pool in pools), view.now),
    )
    memory = _with_needs(config, memory, view.now, pools)
    memory = replace(memory, was_short=_remembered(config, memory, view.now, pools))
    switch, reason = _choose(config, memory, view, pools)
    if switch is not None and not may_switch:
        switch, reason = (
            None,
            (
                f"{switch.name} could become {switch.role.value}, and roles do not change by"
                f" themselves here: {reason}"
            ),
        )
    advice = _advise(config, memory, view, pools, switch)
    if switch is not None:
        memory = replace(memory, switching=switch.name)
    return Verdict(switch, advice, reason, memory)


def check_switch(workers: tuple[WorkerStatus, ...], name: str, role: WorkerRole) -> WorkerStatus:
    """Returns the status of worker `name`, if it may change to `role`.

    Raises:
        InvalidRequestError: The worker is unknown, has this role already, or is mixed.
        UnavailableError: The worker takes no requests, or is the last one of its role.
    """
    worker = next((one for one in workers if one.name == name), None)
    if worker is None:
        raise InvalidRequestError(
            f"no worker {name!r}; known: {', '.join(sorted(one.name for one in workers)) or 'none'}"
        )
    if WorkerRole.MIXED in (worker.role, role):
        raise InvalidRequestError(
            f"worker {name!r} is {worker.role.value} and was asked to become {role.value}; only"
            " prefill and decode workers can change roles"
        )
    if worker.role is role:
        raise InvalidRequestError(f"worker {name!r} is a {role.value} worker already")
    if not worker.serving:
        state = "asleep" if worker.asleep else "draining"
        raise UnavailableError(
            f"worker {name!r} is {state} and cannot change its role now", retry_after_seconds=1.0
        )
    others = [
        one for one in workers if one.role is worker.role and one.serving and one.name != name
    ]
    if not others:
        raise UnavailableError(
            f"worker {name!r} is the last {worker.role.value} worker that takes requests; start"
            " another one first"
        )
    return worker


def usual_layout(
    workers: tuple[WorkerStatus, ...], worker: WorkerStatus, role: WorkerRole
) -> Layout:
    own = Layout.parse(worker.layout)
    layouts = [Layout.parse(one.layout) for one in workers if one.role is role]
    fitting = [layout for layout in layouts if layout.devices <= own.devices]
    return max(fitting, key=lambda layout: (fitting.count(layout), str(layout)), default=own)


class Controller:
    """The elastic controller with its state: the observation window and the memory between
    decisions. Used by the router and by the simulator."""

    def __init__(self, config: ElasticConfig) -> None:
        self.config = config
        self._signals = SloWindow(config.window_seconds)
        self._memory = Memory()
        self.latest: Verdict | None = None
        self.view: View | None = None

    def outcome(self, outcome: EndedRequest) -> None:
        self._signals.outcome(outcome)

    def look(
        self, now: float, statuses: tuple[WorkerStatus, ...], may_switch: bool = True, held: int = 0
    ) -> Verdict:
        """Takes a sample of the workers and decides. After a result with a switch, no result has
        another switch until `switched` is called."""
        self._signals.sample(now, statuses, held)
        self.view = self._signals.view(now, self.config.slo)
        self.latest = decide(self.config, self._memory, self.view, may_switch)
        self._memory = self.latest.memory
        return self.latest

    def switched(self, now: float, seconds: float | None) -> None:
        quiet_until = now + self.config.cooldown_seconds
        known = self._memory.switch_seconds if seconds is None else seconds
        self._memory = Memory(
            was_short=self._memory.was_short, quiet_until=quiet_until, switch_seconds=known
        )
        self._signals.clear()


def _prefill(config: ElasticConfig, view: View) -> _Pool:
    pool, size = view.prefill, len(view.prefill.taking)
    short = _nobody_left(config, view, pool)
    over = 1.0
    if not short and _told(config, view) and _queue_misses(config, view) and pool.waiting >= 0.5:
        over = config.slo.quantile / max(view.ttft_attainment, 1e-9)
        short = (
            f"TTFT {view.ttft_attainment:.0%} within {config.slo.ttft_seconds:g} s, and"
            f" {pool.waiting:.1f} prompts wait"
        )
    load = _offered(config, view, pool.busy, pool.waiting_growth)
    return _Pool(WorkerRole.PREFILL, pool, short, load, _need(size, load, bool(short), over))


def _decode(config: ElasticConfig, view: View) -> _Pool:
    pool, size = view.decode, len(view.decode.taking)
    prefill_waits = view.prefill.waiting >= 0.5
    short = _nobody_left(config, view, pool)
    over = 1.0
    if short:
        pass
    elif _told(config, view) and view.tpot_attainment < config.slo.quantile and pool.batch > 1:
        over = view.tpot_quantile / config.slo.tpot_seconds
        short = f"TPOT {view.tpot_attainment:.0%} within {config.slo.tpot_seconds:g} s"
    elif (
        _told(config, view)
        and _queue_misses(config, view)
        and not prefill_waits
        and pool.waiting > 0
    ):
        over = config.slo.quantile / max(view.ttft_attainment, 1e-9)
        short = (
            f"TTFT {view.ttft_attainment:.0%} within {config.slo.ttft_seconds:g} s, and"
            f" {pool.waiting:.1f} requests wait for room"
        )
    elif view.requests and pool.peak_use >= FULL_USE:
        short = f"pages or slots {pool.peak_use:.0%} in use"
    load = _offered(config, view, pool.peak_busy, pool.waiting_growth)
    return _Pool(WorkerRole.DECODE, pool, short, load, _need(size, load, bool(short), over))


def _offered(config: ElasticConfig, view: View, busy: float, growth: float) -> float:
    """Returns the load that is offered, as a number of workers: that which was served, times the
    requests that came over those that ended."""
    came = 1 + growth / view.requests if _told(config, view) else 1.0
    return busy * max(0.0, came) / config.target_use


def _nobody_left(config: ElasticConfig, view: View, pool: PoolView) -> str:
    return (
        ""
        if pool.taking or not _told(config, view)
        else f"no worker takes requests, and {view.requests} requests ended recently"
    )


def _told(config: ElasticConfig, view: View) -> bool:
    return view.requests >= config.least_requests


def _queue_misses(config: ElasticConfig, view: View) -> bool:
    return (
        view.ttft_attainment < config.slo.quantile
        and view.ttft_without_queue > view.ttft_attainment
    )


def _need(size: int, load: float, short: bool, over: float) -> float:
    return (
        max(load, 1.0, size * min(MOST_OVER, max(1.1, over))) if short else min(float(size), load)
    )


def _remembered(
    config: ElasticConfig, memory: Memory, now: float, pools: tuple[_Pool, _Pool]
) -> tuple[WasShort | None, WasShort | None]:
    def one(pool: _Pool, since: float | None, before: WasShort | None) -> WasShort | None:
        if since is not None and now - since >= config.patience_seconds:
            return WasShort(pool.size, pool.load, now)
        return before if before is not None and now - before.at <= REMEMBER_SECONDS else None

    first, second = map(one, pools, memory.short_since, memory.was_short)
    return first, second


def _choose(
    config: ElasticConfig, memory: Memory, view: View, pools: tuple[_Pool, _Pool]
) -> tuple[Switch | None, str]:
    if memory.switching is not None:
        return None, f"{memory.switching} is changing its role"
    if not view.requests:
        return None, "no traffic"
    if view.now < memory.quiet_until:
        return (
            None,
            f"{memory.quiet_until - view.now:.0f} s until the effect of the last change is known",
        )
    short = [pool for pool in pools if pool.short]
    empty = [pool for pool in short if not pool.size]
    if not short:
        return None, "both pools have room"
    if len(short) == 2 and len(empty) != 1:
        return None, f"both pools are short: {short[0].short}; {short[1].short}"
    to, donor = (pools[0], pools[1]) if (empty or short)[0] is pools[0] else (pools[1], pools[0])
    since = memory.short_since[ROLES.index(to.role)]
    if since is None or view.now - since < config.patience_seconds:
        return (
            None,
            (
                f"{to.role.value} is short, but for less than {config.patience_seconds:g} s:"
                f" {to.short}"
            ),
        )
    if donor.size <= max(1, config.least(donor.role)):
        return (
            None,
            f"{to.role.value} is short, but {donor.role.value} has no worker to spare: {to.short}",
        )
    was_short = memory.was_short[ROLES.index(donor.role)]
    if (
        to.size
        and was_short is not None
        and donor.size - 1 <= was_short.size
        and donor.load >= LIKE_LOAD * was_short.load
    ):
        return (
            None,
            (
                f"{to.role.value} is short, but so was {donor.role.value} with {was_short.size}"
                f" workers under a similar load: {to.short}"
            ),
        )
    worker = min(
        donor.view.taking,
        key=lambda one: (one.running + one.waiting, -sum(one.free_pages), one.name),
    )
    gain = _gain(config, memory, view, to, donor, worker)
    worth = LEAST_GAIN * view.requests_per_second * config.horizon_seconds
    if gain <= worth:
        return (
            None,
            (
                f"{to.role.value} is short, but a change would gain only {gain:.1f} requests"
                f" in {config.horizon_seconds:g} s: {to.short}"
            ),
        )
    everyone = (*view.prefill.taking, *view.decode.taking)
    return (
        Switch(worker.name, to.role, usual_layout(everyone, worker, to.role), gain),
        f"{to.role.value} is short: {to.short}",
    )


def _gain(
    config: ElasticConfig, memory: Memory, view: View, to: _Pool, donor: _Pool, worker: WorkerStatus
) -> float:
    now = _served(to.size, to.need, donor.size, donor.need)
    meanwhile = _served(to.size, to.need, donor.size - 1, donor.need)
    after = _served(to.size + 1, to.need, donor.size - 1, donor.need)
    seconds = memory.switch_seconds if memory.switch_seconds is not None else config.switch_seconds
    settled = max(0.0, config.horizon_seconds - seconds)
    harmed = config.move_harm * worker.running if donor.role is WorkerRole.DECODE else 0.0
    return (
        view.requests_per_second * (settled * (after - now) - seconds * (now - meanwhile)) - harmed
    )


def _served(a: int, a_need: float, b: int, b_need: float) -> float:
    return min(1.0, a / a_need if a_need > 0 else 1.0, b / b_need if b_need > 0 else 1.0)


def _with_needs(
    config: ElasticConfig, memory: Memory, now: float, pools: tuple[_Pool, _Pool]
) -> Memory:
    sizes = pools[0].size, pools[1].size
    first, second = (
        now if size > before else at
        for size, before, at in zip(sizes, memory.sizes, memory.grew_at, strict=True)
    )
    counts = [
        _count(config, pool, now - at) for pool, at in zip(pools, (first, second), strict=True)
    ]
    over = tuple(count > size for count, size in zip(counts, sizes, strict=True))
    over_since = _since(memory.over_since, over, now)
    needed = [
        _highest(
            needs,
            now - config.calm_seconds,
            now,
            count if _lasts(config, since, now) else min(count, size),
        )
        for needs, count, size, since in zip(memory.needed, counts, sizes, over_since, strict=True)
    ]
    return replace(
        memory,
        over_since=over_since,
        needed=(needed[0], needed[1]),
        needed_since=now if memory.needed_since is None else memory.needed_since,
        grew_at=(first, second),
        sizes=sizes,
    )


def _lasts(config: ElasticConfig, since: float | None, now: float) -> bool:
    return since is not None and now - since >= config.patience_seconds


def _highest(needs: Needs, after: float, now: float, count: int) -> Needs:
    return (*(one for one in needs if one[0] > after and one[1] > count), (now, count))


def _count(config: ElasticConfig, pool: _Pool, since_growth: float) -> int:
    """Returns the number of workers that a pool needs now."""
    count = math.ceil(pool.load - 1e-9)
    if count < pool.size:
        count = min(pool.size, math.ceil(pool.load / SHRINK_USE - 1e-9))
    if pool.short and since_growth >= config.window_seconds:
        count = max(count, pool.size + 1)
    return max(count, config.least(pool.role))


def _advise(
    config: ElasticConfig,
    memory: Memory,
    view: View,
    pools: tuple[_Pool, _Pool],
    switch: Switch | None,
) -> Advice:
    changing = switch is not None or memory.switching is not None
    since = memory.needed_since
    calm = since is not None and view.now - since >= config.calm_seconds
    wanted: list[int] = []
    reasons: list[str] = []
    for pool, needs in zip(pools, memory.needed, strict=True):
        role, count = pool.role.value, needs[0][1] if calm else max(pool.size, needs[0][1])
        if changing:
            count = pool.size  # the pools are about to change
        elif count > pool.size and pool.short:
            reasons.append(f"{role} is short: {pool.short}")
        elif count != pool.size:
            reasons.append(
                f"{role} needed up to {count} workers in {config.calm_seconds:g} s, at"
                f" {config.target_use:.0%} use"
            )
        wanted.append(max(count, config.least(pool.role)))
    return Advice(
        wanted[0], wanted[1], pools[0].need, pools[1].need, "; ".join(reasons) or "no change"
    )


def _since(
    before: tuple[float | None, ...], holds: tuple[bool, ...], now: float
) -> tuple[float | None, float | None]:
    first, second = (
        (since if since is not None else now) if true else None
        for since, true in zip(before, holds, strict=True)
    )
    return first, second
