"""The roster of workers: registration, liveness by heartbeats, restarts under the same name, live
views."""

from dataclasses import dataclass, field

import msgspec
import pytest

from jdisagg.dispatch.membership import Membership, WorkerPorts
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError, NameTakenError
from jdisagg.layout.axes import Layout
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS
from tests.fakes.manual_clock import ManualClock

TIMEOUTS = DEFAULT_TIMEOUTS.membership
MODEL = ModelCard("llama", "llama", 512, 256, "float32", 1024, "abc")


@dataclass
class Factory:
    """Ports are stand-ins that know whose they are; closings are written down."""

    closed: list[int] = field(default_factory=list)

    def __call__(self, card: WorkerCard) -> WorkerPorts:
        port: object = card
        prefill, decode = (port, None) if card.role is WorkerRole.PREFILL else (None, port)
        return WorkerPorts(prefill, decode, lambda: self.closed.append(card.boot_id))  # type: ignore[arg-type]


def card(
    name: str, boot_id: int, role: WorkerRole = WorkerRole.DECODE, port: int = 1
) -> WorkerCard:
    return WorkerCard(name, boot_id, role, f"127.0.0.1:{port}", Layout(), MODEL)


def status(name: str, role: WorkerRole = WorkerRole.DECODE, free: int = 8) -> WorkerStatus:
    return WorkerStatus(name, role, "dp=1,tp=1", (free,), (8,), 0, 0, 4, 16, 256)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def factory() -> Factory:
    return Factory()


@pytest.fixture
def membership(clock: ManualClock, factory: Factory) -> Membership:
    return Membership(clock, factory)


def test_a_worker_is_known_with_its_ports_once_registered_and_counts_once_it_said_its_status(
    membership: Membership,
):
    membership.register(card("d", 1))
    assert dict(membership.decode) == {"d": card("d", 1)} and not membership.prefill
    assert membership.statuses() == ()
    assert membership.heartbeat(1, status("d", free=5))
    assert [said.free_pages for said in membership.statuses()] == [(5,)]


def test_ready_needs_a_worker_of_each_kind_or_a_mixed_one(membership: Membership):
    for name, role in (("p", WorkerRole.PREFILL), ("d", WorkerRole.DECODE)):
        assert not membership.ready
        membership.register(card(name, len(name), role))
        membership.heartbeat(len(name), status(name, role))
    assert membership.ready
    membership.deregister("p", 1)
    assert not membership.ready
    membership.register(card("m", 7, WorkerRole.MIXED))
    assert membership.heartbeat(7, status("m", WorkerRole.MIXED)) and membership.ready


def test_silence_makes_a_worker_suspect_and_then_gone_and_its_ports_are_closed(
    membership: Membership, clock: ManualClock, factory: Factory
):
    membership.register(card("d", 1))
    membership.heartbeat(1, status("d"))
    clock.seconds += TIMEOUTS.suspect_seconds + 0.1
    assert membership.statuses()[0].draining
    assert membership.sweep() == () and "d" in membership.decode
    clock.seconds += TIMEOUTS.gone_seconds - TIMEOUTS.suspect_seconds
    assert membership.statuses() == ()
    assert membership.sweep() == (card("d", 1),)
    assert factory.closed == [1] and "d" not in membership.decode
    assert not membership.heartbeat(1, status("d")), "it must register again"


def test_what_a_router_did_not_hear_because_it_was_stopped_is_no_silence(
    membership: Membership, clock: ManualClock, factory: Factory
):
    membership.register(card("d", 1))
    membership.heartbeat(1, status("d"))
    clock.seconds += 60.0
    membership.excuse(59.5)
    assert membership.sweep() == () and not membership.statuses()[0].draining
    clock.seconds += TIMEOUTS.gone_seconds
    assert membership.sweep() == (card("d", 1),) and factory.closed == [1], "from now on it counts"


def test_a_heartbeat_makes_a_suspect_live_again(membership: Membership, clock: ManualClock):
    membership.register(card("d", 1))
    clock.seconds += TIMEOUTS.suspect_seconds + 0.1
    assert membership.heartbeat(1, status("d"))
    assert not membership.statuses()[0].draining


def test_two_processes_under_one_name_do_not_displace_each_other(
    membership: Membership, clock: ManualClock, factory: Factory
):
    first, second = card("d", 1, port=1), card("d", 2, port=2)
    membership.register(first)
    clock.seconds += TIMEOUTS.suspect_seconds - 0.1
    with pytest.raises(
        NameTakenError,
        match=r"worker 'd' at 127.0.0.1:2: a worker with that name is alive at 127.0.0.1:1",
    ):
        membership.register(second)
    assert membership.cards() == (first,) and not factory.closed
    clock.seconds += 0.2
    membership.register(second)
    assert membership.cards() == (second,)
    assert factory.closed == [1], "who is not heard of gives up its name"


def test_a_new_boot_id_replaces_the_old_process_and_its_ports_at_once(
    membership: Membership, factory: Factory
):
    membership.register(card("d", 1))
    membership.heartbeat(1, status("d"))
    membership.register(card("d", 2))
    assert factory.closed == [1] and membership.decode["d"] == card("d", 2)
    assert membership.statuses() == (), "what the old process said is nothing about the new one"
    assert not membership.heartbeat(1, status("d")) and membership.heartbeat(2, status("d"))
    membership.deregister("d", 1)
    assert "d" in membership.decode, "the old process's farewell does not concern the new one"


def test_what_a_worker_sent_before_it_left_can_still_be_read(
    membership: Membership, clock: ManualClock, factory: Factory
):
    membership.register(card("d", 1))
    membership.heartbeat(1, status("d"))
    membership.deregister("d", 1)
    assert not membership.decode and not membership.statuses() and not factory.closed
    clock.seconds += TIMEOUTS.gone_seconds + 0.1
    membership.sweep()
    membership.sweep()
    assert factory.closed == [1]
    membership.register(card("d", 2))
    membership.deregister("d", 2)
    membership.close()
    assert factory.closed == [1, 2]


def test_registering_again_is_no_restart(membership: Membership, factory: Factory):
    membership.register(card("d", 1))
    membership.heartbeat(1, status("d"))
    membership.register(card("d", 1))
    assert not factory.closed and membership.statuses()


@pytest.mark.parametrize(
    ("field_name", "value"),
    [("fingerprint", "other"), ("dtype", "bfloat16"), ("context_tokens", 128)],
)
def test_another_model_is_refused_naming_the_field_and_both_values(
    membership: Membership, field_name: str, value: object
):
    membership.register(card("d", 1))
    other = msgspec.structs.replace(
        card("e", 2), model=msgspec.structs.replace(MODEL, **{field_name: value})
    )
    with pytest.raises(
        IncompatiblePeerError,
        match=f"worker 'e'.*{field_name} is {value!r}.*{getattr(MODEL, field_name)!r}",
    ):
        membership.register(other)
    assert list(membership.decode) == ["d"]


def test_a_worker_needs_a_name_and_an_address(membership: Membership):
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        membership.register(msgspec.structs.replace(card("d", 1), address=""))


def test_workers_may_come_and_go_while_the_views_are_iterated(membership: Membership):
    for boot_id in range(1, 4):
        membership.register(card(f"d{boot_id}", boot_id))
    seen = []
    for name in membership.decode:
        seen.append(name)
        membership.deregister("d3", 3)
        membership.register(card("d9", 9))
    assert seen == ["d1", "d2", "d3"] and len(membership.decode) == 3
    with pytest.raises(KeyError):
        membership.prefill["d1"]


def test_every_change_is_reported(clock: ManualClock):
    told: list[bool] = []
    membership = Membership(
        clock, lambda card: WorkerPorts(), on_change=lambda: told.append(membership.ready)
    )
    membership.register(card("m", 1, WorkerRole.MIXED))
    membership.heartbeat(1, status("m", WorkerRole.MIXED))
    membership.heartbeat(1, status("m", WorkerRole.MIXED))
    clock.seconds += TIMEOUTS.gone_seconds + 1
    membership.sweep()
    assert told == [False, True, False]
