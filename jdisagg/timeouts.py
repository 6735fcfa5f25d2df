"""Every wait, lease, heartbeat and retry of the system, in one validated dataclass.

`Timeouts` is composed of one part a room; each component gets only its own part, through its
constructor. What depends on another value is a property, and relations that must hold between
values are checked when a part is made. docs/timeouts.md shows what the retries multiply to.

What is not here: the deadlines and leases that a deployment sets (`config.LimitsConfig`, which
holds a `Timeouts`), limits of a format or of gRPC, and averaging windows of a policy."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from jdisagg.errors import ConfigError

MOST_DOUBLINGS = 64  # more than any wait is doubled, fewer than a float can be


def _scaled(part: Any, factor: float) -> Any:
    values: dict[str, object] = {}
    for spec in dataclasses.fields(part):
        value = getattr(part, spec.name)
        if dataclasses.is_dataclass(value):
            values[spec.name] = _scaled(value, factor)
        elif spec.name.endswith("_seconds"):
            values[spec.name] = value * factor
    return dataclasses.replace(part, **values)


def _check_positive(part: Any) -> None:
    for spec in dataclasses.fields(part):
        value = getattr(part, spec.name)
        if not dataclasses.is_dataclass(value) and not value > 0:
            raise ConfigError(f"{type(part).__name__}.{spec.name} must be positive, got {value}")


def _check_order(part: Any, less: str, more: str) -> None:
    if getattr(part, less) > getattr(part, more):
        raise ConfigError(
            f"{type(part).__name__}: {less}={getattr(part, less):g} must not exceed"
            f" {more}={getattr(part, more):g}; lower the one or raise the other"
        )


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between tries: each is twice the one before, up to a bound.

    Args:
        first_seconds: after the first failure.
        most_seconds: no wait is longer.

    Raises:
        ConfigError: where `first_seconds` is not positive or exceeds `most_seconds`.
    """

    first_seconds: float
    most_seconds: float

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_order(self, "first_seconds", "most_seconds")

    def seconds(self, failures: int) -> float:
        """How long to wait after so many failures in a row (1 or more)."""
        return min(self.first_seconds * 2 ** min(failures - 1, MOST_DOUBLINGS), self.most_seconds)


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """One request at the router.

    Args:
        close_seconds: for each call that frees something at a worker.
        failed_close_seconds: the same at a worker that has just failed; another waits to take over.
        retry: between the attempts of a request.
        sources: how many prefill workers one attempt tries.
        source_retry: before a prefill worker that failed this attempt is asked again.
        status_seconds: for each worker's status, where no membership keeps them.
        queue_look_seconds: how often waiting requests are tried where no event asks for it.
        queue_pause_seconds: changes within so short a time are looked at together.
        breaker: for how long a worker that fails again and again gets nothing.
        resumption_seconds: for the broken stream of a request that is resumed to be noticed here; a
            server that pings its clients notices within this time that a connection is dead.
        grammar_seconds: for the grammar of a request to be tried, and then to be compiled; one that
            takes 0.8 s of a processor is refused however long this is.
    """

    close_seconds: float = 5.0
    failed_close_seconds: float = 0.5
    retry: Backoff = Backoff(0.02, 1.0)
    sources: int = 4
    source_retry: Backoff = Backoff(0.2, 0.8)
    status_seconds: float = 5.0
    queue_look_seconds: float = 0.05
    queue_pause_seconds: float = 0.002
    breaker: Backoff = Backoff(1.0, 30.0)
    resumption_seconds: float = 8.0
    grammar_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_order(self, "failed_close_seconds", "close_seconds")
        _check_order(self, "queue_pause_seconds", "queue_look_seconds")


@dataclass(frozen=True, slots=True)
class MembershipTimeouts:
    """Workers and their router: registration, heartbeats, changes of role.

    Args:
        heartbeat_seconds: between a worker's reports to its router.
        suspect_seconds: a worker silent for so long gets no new requests.
        gone_seconds: and after so long is forgotten.
        settle_seconds: a status taken so soon after a placement may not show it yet.
        sweep_seconds: how often the router looks for workers that are gone.
        absent_seconds: a sweep so much too late says that the router itself was stopped.
        call_seconds: for each call of a worker to the registry.
        refused_seconds: before a worker that was refused registers again.
        role_look_seconds: how often a change of role is looked at.
        role_uncertain_seconds: for a worker that may be changing its role and does not answer.
        role_change_seconds: for a change of role that the elastic controller asks for.
    """

    heartbeat_seconds: float = 0.25
    suspect_seconds: float = 1.5
    gone_seconds: float = 3.0
    settle_seconds: float = 0.02
    sweep_seconds: float = 0.25
    absent_seconds: float = 1.0
    call_seconds: float = 2.0
    refused_seconds: float = 2.0
    role_look_seconds: float = 0.1
    role_uncertain_seconds: float = 30.0
    role_change_seconds: float = 300.0

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_order(self, "heartbeat_seconds", "suspect_seconds")
        _check_order(self, "suspect_seconds", "gone_seconds")
        _check_order(self, "sweep_seconds", "gone_seconds")

    @property
    def name_taken_seconds(self) -> float:
        """How long a worker asks for a name in use: a dead owner is forgotten sooner."""
        return 2 * self.gone_seconds


@dataclass(frozen=True, slots=True)
class HandoffTimeouts:
    """Two workers at a hand-off of KV.

    Args:
        heartbeat_seconds: between a receiver's reports that it still receives.
        heartbeats_missed: a receiver whose heartbeats fail so often in a row gives up.
        hello_seconds: for the first exchange of two workers.
        peer_idle_seconds: a peer unused for so long is forgotten.
        call_seconds: for each acknowledgement and abort.
        abort_tries: how often a sender is asked to free a hand-off.
        abort_pause_seconds: between these.
        pull_tries: how often each block is pulled.
        resume_seconds: for a new source, once the old one has failed.
        migration_seconds: for another worker to take a sequence over, which goes on meanwhile.
        spilled_seconds: for a sequence whose KV lies in host memory to get pages again; then it is
            computed anew, perhaps elsewhere.
        sweep_seconds: how often expired leases are looked for, at the least.
    """

    heartbeat_seconds: float = 2.0
    heartbeats_missed: int = 2
    hello_seconds: float = 5.0
    peer_idle_seconds: float = 600.0
    call_seconds: float = 5.0
    abort_tries: int = 10
    abort_pause_seconds: float = 1.0
    pull_tries: int = 3
    resume_seconds: float = 5.0
    migration_seconds: float = 30.0
    spilled_seconds: float = 10.0
    sweep_seconds: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_order(self, "heartbeat_seconds", "migration_seconds")

    @property
    def frozen_seconds(self) -> float:
        """A sequence frozen for a move goes on after three heartbeats of silence."""
        return 3 * self.heartbeat_seconds

    @property
    def receiver_silence_seconds(self) -> float:
        """A receiver silent for three heartbeats and half of one will not come back."""
        return 3.5 * self.heartbeat_seconds

    @property
    def least_lease_seconds(self) -> float:
        """A lease must outlast a heartbeat that is late."""
        return 1.5 * self.heartbeat_seconds


@dataclass(frozen=True, slots=True)
class TransferTimeouts:
    """The KV plane between two processes.

    Args:
        watch_seconds: how often pulls in flight are looked at.
        idle_seconds: and how often where there are none.
        pulled_seconds: what has arrived is reported together within this time.
        ask_again_seconds: before a pull that was not answered is asked for again.
        flush_seconds: within which a sender ends a pull that was given up.
        quiet_seconds: a connection on which something arrived this lately is alive.
        fresh_seconds: a connection used this lately still has its sender's buffers.
        tick_seconds: how often the sender looks at its postings.
        slack_seconds: between a pull's deadline and the end of its posting.
        outlet_idle_seconds: the sender frees the buffers of a connection unused for so long.
        error_seconds: how long an error waits for a request that may still be on its way.
        link_send_seconds: for each message between the two ends.
        link_try_seconds: for all tries of one message.
        link_pause_seconds: between these.
        link_idle_seconds: a link unused for so long is closed.
    """

    watch_seconds: float = 0.01
    idle_seconds: float = 0.25
    pulled_seconds: float = 0.05
    ask_again_seconds: float = 1.0
    flush_seconds: float = 1.0
    quiet_seconds: float = 1.0
    fresh_seconds: float = 200.0
    tick_seconds: float = 0.25
    slack_seconds: float = 1.0
    outlet_idle_seconds: float = 300.0
    error_seconds: float = 5.0
    link_send_seconds: float = 2.0
    link_try_seconds: float = 3.0
    link_pause_seconds: float = 0.05
    link_idle_seconds: float = 60.0

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_order(self, "fresh_seconds", "outlet_idle_seconds")
        _check_order(self, "link_send_seconds", "link_try_seconds")
        _check_order(self, "link_pause_seconds", "link_try_seconds")


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """gRPC calls between processes, and the end of a server.

    Args:
        call_seconds: for a call whose arguments state no deadline.
        status_seconds: for a worker's status, and for each owner of metrics.
        report_seconds: for the report of a change of role.
        span_stream_seconds: for the stream of a worker's tokens to open.
        peer_idle_seconds: ports to a worker unused for so long are closed, and no stream of offers
            lasts longer; longer than any hand-off.
        slack_seconds: a call waits so much longer than the deadline that its arguments state, so
            that the other end says why.
        unread_seconds: for a client that does not read its stream's end.
        cleanup_seconds: for each step of a server's end after its drain.
        last_words_seconds: between a worker's drain and its end: the last messages of streams that
            the drain waited for are on their way.
    """

    call_seconds: float = 5.0
    status_seconds: float = 3.0
    report_seconds: float = 2.0
    span_stream_seconds: float = 5.0
    peer_idle_seconds: float = 3600.0
    slack_seconds: float = 1.0
    unread_seconds: float = 1.0
    cleanup_seconds: float = 1.0
    last_words_seconds: float = 0.25

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class InstanceTimeouts:
    """The processes of one instance.

    Args:
        beat_seconds: between the messages by which leader and followers show that they live.
        silence_seconds: so much silence ends the instance once it runs.
        starting_silence_seconds: and while processes load and compile; the leader waits so long for
            its followers.
        look_seconds: how often silence is looked at.
        connect_seconds: for a follower to reach its leader.
        join_seconds: for a follower's first message.
        hang_up_seconds: for a follower to end its stream when the instance stops.
        exit_seconds: for a last message, before the process of a failed instance is ended hard.
        start_seconds: for all processes to find each other through JAX, which then ends them.
        jax_heartbeat_seconds: JAX's own watch over its processes, which ends what the beats above
            did not.
        jax_shutdown_seconds: for JAX's barrier at the end.
    """

    beat_seconds: float = 0.5
    silence_seconds: float = 2.0
    starting_silence_seconds: float = 600.0
    look_seconds: float = 0.1
    connect_seconds: float = 30.0
    join_seconds: float = 10.0
    hang_up_seconds: float = 2.0
    exit_seconds: float = 1.0
    start_seconds: float = 120.0
    jax_heartbeat_seconds: float = 30.0
    jax_shutdown_seconds: float = 10.0

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_order(self, "look_seconds", "silence_seconds")
        _check_order(self, "beat_seconds", "silence_seconds")
        _check_order(self, "silence_seconds", "starting_silence_seconds")


@dataclass(frozen=True, slots=True)
class ProcessTimeouts:
    """The processes of a cluster on one host, and its canary.

    Args:
        restart: before a process that ended is started again.
        long_life_seconds: one that lived so long is started again after the first pause.
        kill_seconds: beyond the drain, until a process that was asked to end is killed.
        canary_seconds: for each of the canary's requests.
        canary_status_seconds: for the status of a worker at which the canary looks.
    """

    restart: Backoff = Backoff(0.2, 10.0)
    long_life_seconds: float = 30.0
    kill_seconds: float = 10.0
    canary_seconds: float = 10.0
    canary_status_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """A client of the public service.

    Args:
        retry: between attempts to resume a broken stream.
        slack_seconds: a client waits so much longer than its request's deadline: the server ends a
            request there and says why, and this is the net below.
    """

    retry: Backoff = Backoff(0.05, 1.0)
    slack_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All of it.

    Args:
        request: one request at the router.
        membership: workers and their router.
        handoff: two workers at a hand-off of KV.
        transfer: the KV plane below a hand-off.
        client: a client of the public service.
        call: gRPC calls between processes.
        instance: the processes of one instance.
        process: the processes of a cluster on one host.

    Raises:
        ConfigError: naming both fields, where two values contradict each other.
    """

    request: RequestTimeouts = field(default_factory=RequestTimeouts)
    membership: MembershipTimeouts = field(default_factory=MembershipTimeouts)
    handoff: HandoffTimeouts = field(default_factory=HandoffTimeouts)
    transfer: TransferTimeouts = field(default_factory=TransferTimeouts)
    client: ClientTimeouts = field(default_factory=ClientTimeouts)
    call: CallTimeouts = field(default_factory=CallTimeouts)
    instance: InstanceTimeouts = field(default_factory=InstanceTimeouts)
    process: ProcessTimeouts = field(default_factory=ProcessTimeouts)

    def scaled(self, factor: float) -> Self:
        """All seconds times `factor`; counts stay. For machines that are slow or overloaded."""
        return _scaled(self, factor)


DEFAULT_TIMEOUTS = Timeouts()
