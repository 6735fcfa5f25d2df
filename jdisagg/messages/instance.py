"""Messages between the leader of an instance and its followers, on one ordered stream per follower.

A follower joins, reports when it is loaded and warm, and then runs every ordered command in order.
It reports what the leader cannot observe: how its part of a pull ended, and failures. Both sides
send heartbeats, and silence counts as death."""

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.plain import Message


class LeaderPlace(Message, frozen=True):
    """Address and secret of the leader. Followers receive it as text through their common JAX
    job."""

    address: str
    secret: int

    def text(self) -> str:
        return f"{self.address} {self.secret:x}"

    @classmethod
    def parse(cls, text: str) -> "LeaderPlace":
        address, secret = text.split(" ")
        return cls(address, int(secret, 16))


class Join(Message, frozen=True):
    """First message on the stream. `secret` authenticates the follower. `end` is the address at
    which its process receives `KvPlane` messages."""

    process: int
    secret: int
    end: KvEnd | None = None


class Ready(Message, frozen=True):
    """The follower's mesh has run its warm-up."""


class Reported(Message, frozen=True):
    """Result of command `number` on this process. Only pulls are reported."""

    number: int
    result: StepResult


class Failed(Message, frozen=True):
    """Command `number` raised on this process. `fatal` means that its mesh is broken. Otherwise
    every process is expected to fail alike."""

    number: int
    message: str
    fatal: bool = True


class Beat(Message, frozen=True):
    """Heartbeat."""


class Begin(Message, frozen=True):
    """All processes are ready. Silence counts from now on."""


class Ordered(Message, frozen=True):
    """Next command to run. Numbers count up by one."""

    number: int
    command: StepCommand


class Stop(Message, frozen=True):
    """Finish the ordered commands, then end."""


FollowerMessage = Join | Ready | Reported | Failed | Beat
LeaderMessage = Ordered | Begin | Beat | Stop
