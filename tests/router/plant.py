"""A cluster for the controller's tests, a fluid model in steps of a second: prompts bring work to a
queue in front of the prefill pool, sequences hold slots of the decode pool. Written from the
definitions alone; it shares nothing with the controller but its data."""

from dataclasses import dataclass, field

from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.elastic import Controller, Switch
from jdisagg.router.elastic_signals import EndedRequest

SLOTS = 16


def status(name: str, role: WorkerRole, **fields: object) -> WorkerStatus:
    values: dict[str, object] = {
        "layout": "dp=1,tp=2,ep=1",
        "free_pages": (100,),
        "total_pages": (100,),
        "running": 0,
        "waiting": 0,
        "slots": SLOTS,
        "page_size": 16,
        "context_tokens": 1024,
    }
    return WorkerStatus(name, role, **{**values, **fields})  # type: ignore[arg-type]


@dataclass
class Load:
    """Requests a second, seconds of a prefill worker for each, seconds that each holds a decode
    slot."""

    rate: float
    prefill_seconds: float
    decode_seconds: float


@dataclass
class Plant:
    """`roles` may change; a worker that changes its role serves nobody for `switch_seconds`."""

    roles: dict[str, WorkerRole]
    controller: Controller
    switch_seconds: float = 20.0
    now: float = 0.0
    backlog: float = 0.0
    decoding: float = 0.0
    pending: float = 0.0
    switches: list[tuple[float, Switch]] = field(default_factory=list)
    away: tuple[float, Switch] | None = None
    _credit: float = 0.0

    @classmethod
    def of(cls, prefill: int, decode: int, controller: Controller, **fields: float) -> "Plant":
        roles = {f"p{index}": WorkerRole.PREFILL for index in range(prefill)} | {
            f"d{index}": WorkerRole.DECODE for index in range(decode)
        }
        return cls(roles, controller, **fields)  # type: ignore[arg-type]

    def count(self, role: WorkerRole) -> int:
        return sum(
            1
            for name, one in self.roles.items()
            if one is role and not (self.away and self.away[1].name == name)
        )

    def run(self, seconds: int, load: Load) -> None:
        for _ in range(seconds):
            self._second(load)

    def _second(self, load: Load) -> None:
        self.now += 1
        prefill, decode = self.count(WorkerRole.PREFILL), self.count(WorkerRole.DECODE)
        assert prefill and decode, "a role without a worker"
        room = max(0.0, decode * SLOTS - self.decoding)
        self.pending += load.rate
        admitted = min(self.pending, room)
        page_wait = self.pending / max(admitted, 1e-9) - 1 if self.pending > admitted else 0.0
        self.pending -= admitted
        wait = self.backlog / prefill
        before = self.backlog + admitted * load.prefill_seconds
        self.backlog = max(0.0, before - prefill)
        self.decoding = max(
            0.0, self.decoding + admitted - self.decoding / max(load.decode_seconds, 1.0)
        )
        served = (
            (before - self.backlog) / load.prefill_seconds if load.prefill_seconds else admitted
        )
        self._credit += served
        queue = min(wait + page_wait, 1e6)
        while self._credit >= 1:
            self._credit -= 1
            self.controller.outcome(
                EndedRequest(self.now, load.prefill_seconds + queue, 0.02, queue)
            )
        busy_share = 1.0 if self.backlog else min(1.0, admitted * load.prefill_seconds / prefill)
        looks = self.now % self.controller.config.interval_seconds == 0
        verdict = (
            self.controller.look(self.now, self._statuses(busy_share, load)) if looks else None
        )
        if self.away and self.now >= self.away[0]:
            self.roles[self.away[1].name] = self.away[1].role
            self.controller.switched(self.now, self.switch_seconds)
            self.away = None
        if verdict is not None and verdict.switch is not None:
            assert self.away is None, "two switches at once"
            self.switches.append((self.now, verdict.switch))
            self.away = (self.now + self.switch_seconds, verdict.switch)

    def _statuses(self, busy_share: float, load: Load) -> tuple[WorkerStatus, ...]:
        here = {
            name: role
            for name, role in self.roles.items()
            if not (self.away and self.away[1].name == name)
        }
        prefill = [name for name, role in here.items() if role is WorkerRole.PREFILL]
        decode = [name for name, role in here.items() if role is WorkerRole.DECODE]
        queued = int(self.backlog / load.prefill_seconds) if load.prefill_seconds else 0
        busy = round(busy_share * len(prefill) + 0.5 * (int(self.now) // 3 % 2))
        each = int(self.decoding / len(decode))
        waiting = int(self.pending)
        free = max(0, 100 - 100 * each // SLOTS)
        return (
            *(
                status(
                    name, WorkerRole.PREFILL, running=int(at < busy), waiting=queued // len(prefill)
                )
                for at, name in enumerate(prefill)
            ),
            *(
                status(
                    name,
                    WorkerRole.DECODE,
                    running=each,
                    free_pages=(free,),
                    waiting=waiting // len(decode),
                )
                for name in decode
            ),
        )
