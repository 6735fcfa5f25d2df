"""Messages between the leader process of an instance and its follower processes, on one ordered
stream per follower.

A follower joins, loads and warms up its mesh, reports this, and then runs the leader's commands in
order. It reports its own failures and the results of its part of each pull. Both sides send
heartbeats and treat a silent peer as dead."""

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.plain import Message


class LeaderPlace(Message, frozen=True):
    """Address and secret of the leader, which followers receive as text through the JAX runtime."""

    address: str
    secret: int

    def text(self) -> str:
        return f"{self.address} {self.secret:x}"

    @classmethod
    def parse(cls, text: str) -> "LeaderPlace":
        address, secret = text.split(" ")
        return cls(address, int(secret, 16))


class Join(Message, frozen=True):
    """First message of a follower. `secret` authenticates the follower, and `end` is its endpoint
    on the KV plane."""

    process: int
    secret: int
    end: KvEnd | None = None


class Ready(Message, frozen=True):
    """Reports that the follower has loaded and warmed up its mesh."""


class Reported(Message, frozen=True):
    """Result of command `number` on this process. Only pulls are reported."""

    number: int
    result: StepResult


class Failed(Message, frozen=True):
    """Command `number` raised an error on this process. `fatal` means that the mesh is broken;
    otherwise every process should have raised the same error."""

    number: int
    message: str
    fatal: bool = True


class Beat(Message, frozen=True):
    """Heartbeat."""


class Begin(Message, frozen=True):
    """Reports that all processes are ready. From here on a silent process counts as dead."""


class Ordered(Message, frozen=True):
    """Next command to run. Numbers count up by one."""

    number: int
    command: StepCommand


class Stop(Message, frozen=True):
    """Requests that the follower finishes the commands it has received and then exits."""


FollowerMessage = Join | Ready | Reported | Failed | Beat
LeaderMessage = Ordered | Begin | Beat | Stop
