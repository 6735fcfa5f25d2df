"""Every wait, lease, heartbeat and retry of the system, in one validated dataclass.

`Timeouts` has one dataclass (part) per component, and each component receives only its part. A part
has three kinds of values:

- Fields, which `--set limits.timeouts.PART.FIELD=VALUE` changes.
- Derived values, which are a fixed multiple of a field (`_Times`) or a property. They change with
  the field.
- Constants without annotation: polling intervals and idle times, which no deployment changes.

Each part checks the relations between its fields when it is created. docs/timeouts.md shows how
long nested retries can take in total. Deadlines and leases that depend on the deployment are in
`config.LimitsConfig`, which contains a `Timeouts`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from jdisagg.settings.declared import AtMost, Count, Positive, Settings

MAX_DOUBLINGS = 64  # 2**64 exceeds every bound, and a float still holds it


class _Times:
    def __init__(self, name: str, factor: float) -> None:
        self._name = name
        self._factor = factor

    def __get__(self, part: object, owner: type) -> float:
        return self._factor * getattr(part, self._name)


def _scaled(part: Any, factor: float) -> Any:
    values: dict[str, object] = {}
    for spec in dataclasses.fields(part):
        value = getattr(part, spec.name)
        if dataclasses.is_dataclass(value):
            values[spec.name] = _scaled(value, factor)
        elif spec.name.endswith("_seconds"):
            values[spec.name] = value * factor
    return dataclasses.replace(part, **values)


@dataclass(frozen=True, slots=True)
class Backoff(Settings):
    """Exponential backoff: each wait between tries is twice the previous wait, up to a maximum.

    Args:
        first_seconds: Wait after the first failure.
        most_seconds: Longest wait.
    """

    first_seconds: Annotated[Positive, AtMost("most_seconds")]
    most_seconds: Positive

    def seconds(self, failures: int) -> float:
        return min(self.first_seconds * 2 ** min(failures - 1, MAX_DOUBLINGS), self.most_seconds)


@dataclass(frozen=True, slots=True)
class RequestTimeouts(Settings):
    """Timeouts of one request at the router.

    Attributes:
        close_seconds: Time limit of each call that frees resources at a worker.
        retry: Waits between the attempts of a request.
        sources: Largest number of prefill workers that one attempt tries.
        breaker: Periods for which a worker that failed repeatedly gets no requests.
        resumption_seconds: Longest time that a resumed request waits for the end of its broken
            stream. Servers that ping their clients detect a dead connection within this time.
        grammar_seconds: Time limit for validating and compiling the grammar of a request. A grammar
            that needs more than 0.8 s of processor time is always refused.
    """

    close_seconds: Positive = 5.0
    retry: Backoff = Backoff(0.02, 1.0)
    sources: Count = 4
    breaker: Backoff = Backoff(1.0, 30.0)
    resumption_seconds: Positive = 8.0
    grammar_seconds: Positive = 5.0

    # Limit of freeing resources at a worker that has just failed. It is short, because the next
    # attempt waits for it.
    failed_close_seconds = _Times("close_seconds", 0.1)
    status_seconds = _Times("close_seconds", 1.0)
    # The admission queue is polled in addition to events. Changes within the pause are handled
    # together.
    queue_look_seconds = 0.05
    absent_look_seconds = 0.1  # a placed request looks for workers again while a role has none
    queue_pause_seconds = 0.002

    @property
    def source_retry(self) -> Backoff:
        """Backoff after which the same attempt of a request tries a failed prefill worker again."""
        return Backoff(
            min(10 * self.retry.first_seconds, 0.8 * self.retry.most_seconds),
            0.8 * self.retry.most_seconds,
        )


@dataclass(frozen=True, slots=True)
class MembershipTimeouts(Settings):
    """Timeouts between workers and their router: registration, heartbeats, role changes.

    Attributes:
        heartbeat_seconds: Interval of a worker's reports to its router.
        suspect_seconds: Time without a heartbeat after which a worker gets no new requests.
        gone_seconds: Time without a heartbeat after which a worker is removed.
        role_change_seconds: Limit of a role change that the elastic controller starts.
    """

    heartbeat_seconds: Annotated[Positive, AtMost("suspect_seconds")] = 0.25
    suspect_seconds: Annotated[Positive, AtMost("gone_seconds")] = 1.5
    gone_seconds: Positive = 3.0
    role_change_seconds: Positive = 300.0

    call_seconds = _Times("gone_seconds", 2 / 3)  # limit of each call of a worker to the registry
    # Limit for a registering worker to answer the router's test call.
    reach_seconds = _Times("gone_seconds", 1 / 2)
    refused_seconds = _Times("gone_seconds", 2 / 3)  # pause before a refused worker tries again
    # A crashed worker is removed before a new worker with the same name stops trying to register.
    name_taken_seconds = _Times("gone_seconds", 2.0)
    # Limit on the silence of a worker during a role change.
    role_uncertain_seconds = _Times("gone_seconds", 10.0)
    # If a sweep is late by this time, the router's own process was suspended.
    absent_seconds = _Times("gone_seconds", 1 / 3)
    settle_seconds = 0.02  # a status this soon after a placement may not include it yet
    sweep_seconds = 0.25  # interval of the search for workers that are gone
    role_look_seconds = 0.1


@dataclass(frozen=True, slots=True)
class HandoffTimeouts(Settings):
    """Timeouts of a KV hand-off between two workers.

    Attributes:
        heartbeat_seconds: Interval of the heartbeats that a receiver sends during a transfer.
        call_seconds: Limit of each acknowledgement, abort and first exchange of two workers.
        pull_tries: Largest number of tries to pull a block.
        migration_seconds: Time limit for another worker to take over a running sequence. The
            sequence keeps running on the old worker during this time.
    """

    heartbeat_seconds: Annotated[Positive, AtMost("migration_seconds")] = 2.0
    call_seconds: Positive = 5.0
    pull_tries: Count = 3
    migration_seconds: Positive = 30.0

    hello_seconds = _Times("call_seconds", 1.0)
    resume_seconds = _Times("call_seconds", 1.0)  # wait for a new source after the old one failed
    # Silence of the receiver after which a sequence that was frozen for a migration runs again.
    frozen_seconds = _Times("heartbeat_seconds", 3.0)
    # Silence of the receiver after which it counts as lost.
    receiver_silence_seconds = _Times("heartbeat_seconds", 3.5)
    least_lease_seconds = _Times("heartbeat_seconds", 1.5)  # a lease outlasts one late heartbeat
    # Longest interval between searches for leases that have ended.
    sweep_seconds = _Times("heartbeat_seconds", 0.5)
    heartbeats_missed = 2  # failed heartbeats in a row after which a receiver gives up
    abort_tries = 10
    abort_pause_seconds = 1.0
    peer_idle_seconds = 600.0  # after which an unused peer is removed


@dataclass(frozen=True, slots=True)
class TransferTimeouts(Settings):
    """Timeouts of the KV plane between two processes.

    Attributes:
        outlet_idle_seconds: Time after which the sender frees the buffers of an unused connection.
        link_try_seconds: Time limit for all tries to send one message to the other process.
    """

    outlet_idle_seconds: Positive = 300.0
    link_try_seconds: Positive = 3.0

    link_send_seconds = _Times("link_try_seconds", 2 / 3)  # one try: a lost message is sent again
    ask_again_seconds = _Times("link_try_seconds", 1 / 3)  # before an unanswered pull is repeated
    quiet_seconds = _Times("link_try_seconds", 1 / 3)  # a connection that received lately is alive
    slack_seconds = _Times("link_try_seconds", 1 / 3)  # from a pull's deadline to its posting's end
    error_seconds = _Times("link_try_seconds", 5 / 3)  # an error waits for a request on its way
    watch_seconds = 0.01  # polling of pulls in flight
    idle_seconds = 0.25  # polling without pulls in flight
    pulled_seconds = 0.05  # arrivals within this time are reported together
    tick_seconds = 0.25  # polling of the sender's postings
    link_pause_seconds = 0.05
    link_idle_seconds = 60.0  # after which an unused link is closed
    suspect_seconds = 60.0  # two errors of a connection within this time close it


@dataclass(frozen=True, slots=True)
class CallTimeouts(Settings):
    """Timeouts of gRPC calls between processes and of a server's shutdown.

    Attributes:
        call_seconds: Time limit of a call whose arguments contain no deadline.
        status_seconds: Time limit for reading a worker's status, and for reading each component's
            metrics at a scrape.
    """

    call_seconds: Positive = 5.0
    status_seconds: Positive = 3.0

    span_stream_seconds = _Times("call_seconds", 1.0)  # limit for a worker's token stream to open
    report_seconds = _Times("call_seconds", 0.4)  # limit for the report of a role change
    # A call outlasts the deadline in its arguments, so that the other end reports the reason.
    slack_seconds = _Times("call_seconds", 0.2)
    # Margin after a request's deadline in which its client must read the end of the stream.
    unread_seconds = _Times("call_seconds", 0.2)
    cleanup_seconds = _Times("call_seconds", 0.2)  # limit of each shutdown step after the drain
    last_words_seconds = 0.25  # pause after a drain, in which streams send their last messages
    peer_idle_seconds = 3600.0  # after which unused ports are closed; longer than any hand-off


@dataclass(frozen=True, slots=True)
class InstanceTimeouts(Settings):
    """Timeouts between the processes of one instance.

    Attributes:
        beat_seconds: Interval of the heartbeats between leader and followers.
        silence_seconds: A running instance fails if one of its processes sends no heartbeat for
            this long.
        starting_silence_seconds: The same limit during the start, while processes load and compile.
            Any message counts.
        start_seconds: Time limit for all processes to connect through JAX. JAX then ends the
            processes.
    """

    beat_seconds: Annotated[Positive, AtMost("silence_seconds")] = 0.5
    silence_seconds: Annotated[Positive, AtMost("starting_silence_seconds")] = 2.0
    starting_silence_seconds: Positive = 600.0
    start_seconds: Positive = 120.0

    connect_seconds = _Times("start_seconds", 1 / 4)  # limit for a follower to reach its leader
    join_seconds = _Times("start_seconds", 1 / 12)  # limit for a follower's first message
    # JAX's own heartbeat ends a process that the heartbeats above did not end.
    jax_heartbeat_seconds = _Times("start_seconds", 1 / 4)
    jax_shutdown_seconds = _Times("start_seconds", 1 / 12)
    hang_up_seconds = _Times("silence_seconds", 1.0)  # limit for followers to end at a stop
    exit_seconds = _Times("silence_seconds", 0.5)  # time for the last message of a failed instance
    look_seconds = 0.1


@dataclass(frozen=True, slots=True)
class ProcessTimeouts(Settings):
    """Timeouts of a supervisor's processes on one host, and of the canary requests.

    Attributes:
        restart: Waits before a process that ended is started again.
        kill_seconds: Time after the end of a drain until a process that has not exited is killed.
        canary_seconds: Limit of each canary request.
    """

    restart: Backoff = Backoff(0.2, 10.0)
    kill_seconds: Positive = 10.0
    canary_seconds: Positive = 10.0

    @property
    def long_life_seconds(self) -> float:
        """Run time after which the failures of a process are counted from zero again. If it then
        ends, it is restarted after the shortest wait."""
        return 3 * self.restart.most_seconds


@dataclass(frozen=True, slots=True)
class ClientTimeouts(Settings):
    """Timeouts of a client of the public service.

    Attributes:
        retry: Waits between attempts to resume a broken stream.
        slack_seconds: Time that a client waits after its request's deadline for the server's error,
            which contains the reason.
    """

    retry: Backoff = Backoff(0.05, 1.0)
    slack_seconds: Positive = 5.0


@dataclass(frozen=True, slots=True)
class Timeouts(Settings):
    """The timeouts of all components."""

    request: RequestTimeouts = field(default_factory=RequestTimeouts)
    membership: MembershipTimeouts = field(default_factory=MembershipTimeouts)
    handoff: HandoffTimeouts = field(default_factory=HandoffTimeouts)
    transfer: TransferTimeouts = field(default_factory=TransferTimeouts)
    client: ClientTimeouts = field(default_factory=ClientTimeouts)
    call: CallTimeouts = field(default_factory=CallTimeouts)
    instance: InstanceTimeouts = field(default_factory=InstanceTimeouts)
    process: ProcessTimeouts = field(default_factory=ProcessTimeouts)

    def scaled(self, factor: float) -> Self:
        return _scaled(self, factor)


DEFAULT_TIMEOUTS = Timeouts()
