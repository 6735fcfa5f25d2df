"""Whom a worker receives from: greeted once for each start of a peer, never taken for the one that
was there before."""

from dataclasses import replace

import msgspec
import pytest

from jdisagg.errors import IncompatiblePeerError
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.messages.packed import PROTOCOL
from jdisagg.messages.ports import HandoffSource, PeerHello
from jdisagg.messages.step_commands import ConnectPeer, DisconnectPeer, StepCommand
from jdisagg.messages.worker_status import LinkTimes
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.settings.timeouts import HandoffTimeouts
from jdisagg.telemetry import Counters
from jdisagg.worker.peers import (
    ASSUMED_BYTE_SECONDS,
    LinkMeter,
    Peers,
    SideCalls,
    check_hello,
    words_of_layers,
)
from jdisagg.worker.step_loop import StepLoop
from tests.fakes.fake_executor import FakeChannel, FakeExecutor, toy_limits


class Sender:
    """A peer that counts its hellos, and starts again when it is told to."""

    def __init__(self, hello: PeerHello) -> None:
        self.says = hello
        self.hellos = 0

    async def hello(self, hello: PeerHello) -> PeerHello:
        self.hellos += 1
        return msgspec.structs.replace(self.says)

    def restart(self) -> None:
        self.says = msgspec.structs.replace(self.says, boot_id=self.says.boot_id + 1)


def hello_of(worker: str, limits: MeshLimits, boot_id: int = 1, key: int = 5) -> PeerHello:
    layers, dtype = words_of_layers(limits.kv_spec), limits.kv_spec.row_dtype
    groups = limits.layer_groups
    card = FakeExecutor(limits, FakeChannel()).card
    return PeerHello(PROTOCOL, worker, "model", layers, dtype, groups, boot_id, key, mesh=card)


def connections(log: list[StepCommand]) -> list[str]:
    return [
        f"{type(command).__name__} {command.peer}"
        for command in log
        if isinstance(command, ConnectPeer | DisconnectPeer)
    ]


def acquainted() -> tuple[FakeExecutor, Sender, PeerHello, Peers]:
    """A worker's mesh, the peer "p" that sends to it, the worker's own hello, and its peers."""
    mesh = FakeExecutor(toy_limits(), FakeChannel())
    sender = Sender(hello_of("p", mesh.limits, 10, 77))
    loop = StepLoop(mesh, lambda _: None, lambda *_: None, lambda _: None)
    ours = hello_of("d", mesh.limits)
    peers = Peers(
        lambda _: sender,  # type: ignore[arg-type, return-value]
        ours,
        loop,
        "none",
        lambda: 0.0,
        HandoffTimeouts(),
        SideCalls(Counters(), HandoffTimeouts()),
    )
    return mesh, sender, ours, peers


async def test_a_peer_is_greeted_again_only_where_a_hand_off_names_another_start_of_it_or_none():
    mesh, sender, _, peers = acquainted()

    async def greeted(boot_id: int) -> tuple[str, int]:
        link = await peers.greet(HandoffSource("p", 1, "host:1", boot_id), sender)  # type: ignore[arg-type]
        return link.peer, sender.hellos

    assert await greeted(10) == ("p#a", 1)
    assert await greeted(10) == ("p#a", 1), "its start is known"
    assert await greeted(0) == ("p#a", 2), "nobody says which start it is"
    sender.restart()
    assert await greeted(11) == ("p#b", 3)
    assert await greeted(11) == ("p#b", 3)
    assert await greeted(10) == ("p#b", 4), (
        "the router was late: what answers there is another start"
    )
    assert connections(mesh.log) == ["ConnectPeer p#a", "DisconnectPeer p#a", "ConnectPeer p#b"]


async def test_workers_of_other_weights_refuse_a_hand_off_and_are_greeted_again_after_an_update():
    mesh, sender, ours, peers = acquainted()

    async def greet(weights: str) -> None:
        source = HandoffSource("p", 1, "host:1", 10, weights)
        await peers.greet(source, sender)  # type: ignore[arg-type]

    await greet("")
    with pytest.raises(IncompatiblePeerError, match="'new'"):
        await greet("new")
    assert sender.hellos == 1
    peers.introduce(msgspec.structs.replace(ours, weights="new"))
    with pytest.raises(IncompatiblePeerError, match="weights is 'new' on 'd' and '' on 'p'"):
        await greet("new")  # the router states what the sender does not have
    sender.says = msgspec.structs.replace(sender.says, weights="new")
    await greet("new")
    assert sender.hellos == 3
    await greet("new")
    assert sender.hellos == 3
    assert connections(mesh.log) == ["ConnectPeer p#a"], "the connection stays"


async def test_nothing_is_kept_of_a_peer_that_is_disconnected() -> None:
    mesh, sender, _, peers = acquainted()
    source = HandoffSource("p", 1, "host:1", 10)
    lines = [peers.line_to(source, attempt) for attempt in (1, 2)]
    await lines[0].greet(peers)
    lines[0].arrived(100, 1.0)
    assert lines[0].share is lines[1].share
    peers.sweep(2 * HandoffTimeouts.peer_idle_seconds)
    assert connections(mesh.log) == ["ConnectPeer p#a", "DisconnectPeer p#a"]
    assert not peers.meter.links() and peers.line_to(source, 3).share is not lines[0].share


BF16 = replace(
    toy_limits(), kv_spec=KVSpec.attention(layers=2, kv_heads=1, head_dim=1, dtype="bfloat16")
)


@pytest.mark.parametrize(
    ("limits", "tuning", "allowed", "outcome"),
    [
        (toy_limits(), ("decode:aa", "decode:bb"), (False, False), "refused"),
        (toy_limits(), ("decode:aa", "decode:bb"), (True, False), "refused"),
        (toy_limits(), ("decode:aa", "decode:bb"), (True, True), "warned"),
        (BF16, ("decode:aa", "decode:bb"), (False, False), "warned"),
        (toy_limits(), ("decode:aa", "decode:aa"), (False, False), "met"),
        (toy_limits(), ("decode:aa", "prefill:bb"), (False, False), "met"),
        (toy_limits(), ("decode:aa", ""), (False, False), "met"),
    ],
)
def test_workers_of_a_kind_with_other_autotune_results_are_warned_of_and_float32_is_refused(
    limits: MeshLimits,
    tuning: tuple[str, str],
    allowed: tuple[bool, bool],
    outcome: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = (
        msgspec.structs.replace(hello_of(name, limits), tuning=result, tuned_apart=apart)
        for name, result, apart in zip("de", tuning, allowed, strict=True)
    )
    both = "autotune results are aa on 'd' and bb on 'e'"
    if outcome == "refused":
        with pytest.raises(IncompatiblePeerError, match=both) as refused:
            check_hello(ours, theirs)
        assert "--autotune_results" in refused.value.message
        assert "limits.tuned_apart" in refused.value.message
    else:
        check_hello(ours, theirs)
    assert (both in caplog.text) == (outcome == "warned")


def test_a_link_of_blocks_of_several_sizes_has_a_latency_and_a_time_per_byte() -> None:
    meter = LinkMeter(lambda: 0.0)
    for size in (1000, 9000, 4000) * 8:
        meter.add("p", size, 0.5 + 0.001 * size)
    (link,) = meter.links()
    assert link.sender == "p"
    assert link.latency_seconds == pytest.approx(0.5) and link.byte_seconds == pytest.approx(0.001)


def test_a_link_of_equal_blocks_has_an_assumed_time_per_byte() -> None:
    meter = LinkMeter(lambda: 0.0)
    for _ in range(3):
        meter.add("p", 1000, 0.25)
    assert meter.links() == (LinkTimes("p", 0.25, ASSUMED_BYTE_SECONDS),)


def test_a_link_is_reported_again_only_after_a_noticeable_change() -> None:
    meter = LinkMeter(lambda: 0.0)
    meter.add("p", 1000, 0.25)
    before = meter.links()
    meter.add("p", 1000, 0.26)
    assert meter.links() == before
    for _ in range(20):
        meter.add("p", 1000, 1.0)
    assert meter.links() != before
    meter.forget("p")
    assert meter.links() == ()


def test_a_link_that_was_slow_is_tried_again_and_then_has_the_times_of_the_trial() -> None:
    clock = [0.0]
    meter = LinkMeter(lambda: clock[0])
    for _ in range(20):
        meter.add("p", 1000, 4.0)
    reported = []
    for minutes in (0.5, 1, 2, 9):
        clock[0] = 60.0 * minutes
        reported += [link.latency_seconds for link in meter.links()]
    assert reported == [4.0, 2.0, 1.0, 4.0 / 2**9]
    meter.add("p", 1000, 0.01)
    assert meter.links() == (LinkTimes("p", 0.01, ASSUMED_BYTE_SECONDS),)
