"""Messages between the leader process of an instance (one model replica on several hosts) and its
follower processes. Each follower has one ordered stream to the leader.

Both sides send heartbeats and treat a silent process as dead."""

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.plain import Message


class LeaderPlace(Message, frozen=True):
    """Address and secret of the leader. Followers receive both in one text through the JAX
    distributed runtime."""

    address: str
    secret: int

    def text(self) -> str:
        return f"{self.address} {self.secret:x}"

    @classmethod
    def parse(cls, text: str) -> "LeaderPlace":
        address, secret = text.split(" ")
        return cls(address, int(secret, 16))


class Join(Message, frozen=True):
    """First message of a follower. `secret` authenticates the follower. `end` is the follower's
    endpoint for KV transfers."""

    process: int
    secret: int
    end: KvEnd | None = None


class Ready(Message, frozen=True):
    """Reports that the follower has loaded the model and compiled its programs."""


class Reported(Message, frozen=True):
    """Result of the command with number `number` on this follower. Only results of `IN_PARTS`
    commands are reported."""

    number: int
    result: StepResult


class Failed(Message, frozen=True):
    """Reports that the command with number `number` raised an error on this follower. If `fatal` is
    set, the mesh cannot be used any more. A non-fatal error occurs on every process of the instance
    in the same way."""

    number: int
    message: str
    fatal: bool = True


class Beat(Message, frozen=True):
    """Heartbeat, sent in both directions."""


class Begin(Message, frozen=True):
    """Reports that all processes are ready. From this message on, both sides treat a silent process
    as dead."""


class Ordered(Message, frozen=True):
    """The next command that the follower must run. Command numbers increase by one."""

    number: int
    command: StepCommand


class Stop(Message, frozen=True):
    """Requests that the follower finishes the commands that it has received, and then exits."""


FollowerMessage = Join | Ready | Reported | Failed | Beat
LeaderMessage = Ordered | Begin | Beat | Stop
