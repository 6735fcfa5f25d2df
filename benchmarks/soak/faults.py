"""A channel with the faults of a bad network: pulls and offers are lost, late, duplicated,
corrupted, mixed up, or fail.

Wraps any `Channel`. The calls with faults are drawn from a seeded generator, or forced at the n-th
call, so that a run can be repeated as far as the order of threads allows. A fault is counted when
it took effect (a corrupted array was returned, a late one was withheld), not when it was drawn. A
test that injects faults asserts on `FaultPlan.took_effect`.

Faults of a pull: DROP (never arrives and fails at its deadline), DELAY, DUPLICATE (a second pull of
the same offer, cancelled when the first has arrived), CORRUPT (one byte of the first token of one
shard), WRONG_ID (another offer's block, or no block), ERROR (fails at once). Faults of an offer:
DROP (not made), DELAY (made later), DUPLICATE (made twice), ERROR (made, then revoked)."""

import enum
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.transfer.channel import BlockStamp, Channel, Offered, Pull, PullTarget

_NO_STAMP = BlockStamp()
REMEMBERED_IDS = 32


class Fault(enum.Enum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    WRONG_ID = "wrong id"
    ERROR = "error"


OF_PULLS = frozenset(Fault)
OF_OFFERS = frozenset({Fault.DROP, Fault.DELAY, Fault.DUPLICATE, Fault.ERROR})


@dataclass
class FaultPlan:
    """Which calls get faults. `rates`: probability of each fault per call. `forced`: (operation,
    call number from 1) -> fault, applied before any random draw; operations are "pull" and "offer".
    `delay_seconds`: longest delay. Thread-safe."""

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict)
    forced: Mapping[tuple[str, int], Fault] = field(default_factory=dict)
    delay_seconds: float = 0.3
    took_effect: "Counter[tuple[str, Fault]]" = field(default_factory=Counter)
    calls: "Counter[str]" = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._put_off: deque[tuple[str, Fault]] = deque()

    def draw(self, operation: str, possible: frozenset[Fault]) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            at = self.random.random()
            if (operation, self.calls[operation]) in self.forced:
                return self.forced[operation, self.calls[operation]]
            if self._put_off and self._put_off[0][0] == operation:
                return self._put_off.popleft()[1]
            for fault, rate in self.rates.items():
                if fault in possible and at < rate:
                    return fault
                at -= rate if fault in possible else 0.0
            return None

    def put_off(self, operation: str, fault: Fault) -> None:
        """Moves a forced fault that could not take effect (its pull ended earlier, on a busy
        machine) to the next call."""
        with self._lock:
            if self.forced:
                self._put_off.append((operation, fault))

    def took(self, operation: str, fault: Fault) -> None:
        with self._lock:
            self.took_effect[operation, fault] += 1

    def seconds(self) -> float:
        return self.random.uniform(0.2, 1.0) * self.delay_seconds

    @property
    def total(self) -> int:
        return sum(self.took_effect.values())


def everything(rate: float) -> dict[Fault, float]:
    """Returns rates by which the fraction `rate` of all pulls gets a fault, with all kinds equally
    likely."""
    return {fault: rate / len(Fault) for fault in Fault}


class FaultyChannel:
    """A `Channel` with faults. Other attributes (`warm_up`) are those of the inner channel. `watch`
    receives each pull and may delay it."""

    def __init__(
        self,
        inner: Channel,
        plan: FaultPlan,
        clock: Clock,
        watch: Callable[[PullTarget, Pull], Pull] | None = None,
    ) -> None:
        self.plan = plan
        self._watch = watch or (lambda _, pull: pull)
        self._inner = inner
        self._clock = clock
        self._recent: deque[int] = deque(maxlen=REMEMBERED_IDS)
        self._duplicates: list[Pull] = []
        self._late: dict[int, threading.Timer] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def connect(self, peer: str, card: MeshCard) -> None:
        self._inner.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
    ) -> None:
        def make() -> None:
            with self._lock:
                self._late.pop(offer_id, None)
            self._inner.offer(offer_id, block, rank, stamp)

        fault = self.plan.draw("offer", OF_OFFERS)
        if fault is not None:
            self.plan.took("offer", fault)
        if fault is Fault.DELAY:
            timer = threading.Timer(self.plan.seconds(), make)
            timer.daemon = True
            with self._lock:
                self._late[offer_id] = timer
            timer.start()
        elif fault is not Fault.DROP:
            make()
        if fault is Fault.ERROR:
            self._inner.revoke(offer_id, "an injected fault")
        if fault is Fault.DUPLICATE:
            try:
                make()
            except HandoffError:
                return
            raise AssertionError("the channel took the same offer twice")

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        return self._watch(target, self._pull(offer_id, target, deadline_seconds))

    def _pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        fault = self.plan.draw("pull", OF_PULLS)
        self._forget_duplicates()
        if fault is Fault.WRONG_ID:
            wrong = self._another(offer_id)
            self.plan.took("pull", fault)
            return self._inner.pull(wrong, target, deadline_seconds)
        self._recent.append(offer_id)
        if fault in (Fault.DROP, Fault.ERROR):
            self.plan.took("pull", fault)
            return _LostPull(
                self._clock,
                deadline_seconds if fault is Fault.DROP else 0.0,
                f"offer {offer_id:#x}: injected {fault.value}",
            )
        pull = self._inner.pull(offer_id, target, deadline_seconds)
        if fault is Fault.DUPLICATE:
            self.plan.took("pull", fault)
            with self._lock:
                self._duplicates.append(self._inner.pull(offer_id, target, deadline_seconds))
        if fault is Fault.DELAY:
            return _LatePull(pull, self.plan, self._clock)
        if fault is Fault.CORRUPT:
            return _GarbledPull(pull, self.plan, target.rank)
        return pull

    def release(self, offer_id: int) -> None:
        self._forget_late(offer_id)
        self._inner.release(offer_id)

    def revoke(self, offer_id: int, reason: str) -> None:
        self._forget_late(offer_id)
        self._inner.revoke(offer_id, reason)

    def offered(self) -> Offered:
        return self._inner.offered()

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self._inner.bytes_per_pair()

    def _another(self, offer_id: int) -> int:
        others = [known for known in self._recent if known != offer_id]
        return self.plan.random.choice(others) if others else self.plan.random.getrandbits(64)

    def _forget_late(self, offer_id: int) -> None:
        with self._lock:
            timer = self._late.pop(offer_id, None)
        if timer is not None:
            timer.cancel()

    def _forget_duplicates(self) -> None:
        with self._lock:
            over = [pull for pull in self._duplicates if pull.is_ready()]
            self._duplicates = [pull for pull in self._duplicates if pull not in over]
        for pull in over:
            pull.cancel()


class _LostPull(Pull):
    """A pull that fails after a while and transfers nothing."""

    def __init__(self, clock: Clock, seconds: float, reason: str) -> None:
        super().__init__(0, clock, seconds)
        self._clock = clock
        self._reason = reason

    def is_ready(self) -> bool:
        if self._clock.now() >= self.deadline:
            self.fail(HandoffError(self._reason))
        return super().is_ready()


class AroundPull(Pull):
    """Base class: a pull that behaves like the inner pull."""

    def __init__(self, inner: Pull) -> None:
        self._inner = inner

    @property
    def bytes_moved(self) -> int:
        return self._inner.bytes_moved

    def is_ready(self) -> bool:
        return self._inner.is_ready()

    def failed(self) -> JdisaggError | None:
        return self._inner.failed() if self.is_ready() else None

    def arrays(self) -> tuple[jax.Array, ...]:
        return self._inner.arrays()

    def cancel(self) -> None:
        self._inner.cancel()


class _FaultyPull(AroundPull):
    """A pull whose fault takes effect later. If the pull ends earlier, the fault is moved to
    another pull."""

    def __init__(self, inner: Pull, plan: FaultPlan, fault: Fault) -> None:
        super().__init__(inner)
        self._plan = plan
        self._fault: Fault | None = fault

    def _took(self) -> None:
        if self._fault is not None:
            self._plan.took("pull", self._fault)
        self._fault = None

    def _ended(self) -> None:
        if self._fault is not None:
            self._plan.put_off("pull", self._fault)
        self._fault = None

    def failed(self) -> JdisaggError | None:
        if (error := super().failed()) is not None:
            self._ended()
        return error

    def cancel(self) -> None:
        self._ended()
        super().cancel()


class _LatePull(_FaultyPull):
    def __init__(self, inner: Pull, plan: FaultPlan, clock: Clock) -> None:
        super().__init__(inner, plan, Fault.DELAY)
        self._clock = clock
        self._seconds = plan.seconds()
        self._until: float | None = None

    def is_ready(self) -> bool:
        if not self._inner.is_ready():
            return False
        if self._until is None:
            self._until = self._clock.now() + self._seconds
            self._took()
        return self._clock.now() >= self._until


class _GarbledPull(_FaultyPull):
    def __init__(self, inner: Pull, plan: FaultPlan, rank: int) -> None:
        super().__init__(inner, plan, Fault.CORRUPT)
        self._rank = rank

    def arrays(self) -> tuple[jax.Array, ...]:
        first, *rest = self._inner.arrays()
        self._took()
        return (garbled(first, self._rank, self._plan.random), *rest)


def garbled(array: jax.Array, rank: int, rng: random.Random) -> jax.Array:
    """Returns `array` [dp, C, K, T, x] with one byte of the first token changed, in one shard of dp
    rank `rank`. The first token is valid in every block."""
    shards = list(array.addressable_shards)
    hit = next(index for index, shard in enumerate(shards) if (shard.index[0].start or 0) == rank)
    values = np.array(jax.device_get(shards[hit].data))
    at = (
        0,
        rng.randrange(values.shape[1]),
        rng.randrange(values.shape[2]),
        0,
        rng.randrange(values.shape[4]),
    )
    raw = values[at].reshape(1).view(np.uint8)
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    values[at] = raw.view(values.dtype)[0]
    parts = [
        jax.device_put(values, shard.device) if index == hit else shard.data
        for index, shard in enumerate(shards)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
