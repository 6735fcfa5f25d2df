"""What the leader of an instance and its followers say to each other, over one ordered stream for
each follower. Plain data.

A follower joins, says when it is ready (loaded and warm), then obeys: it runs every ordered
command, in order, and reports what the leader cannot know: how its part of a pull ended, and what
failed. Both sides beat, so that silence means death."""

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.plain import Message


class LeaderPlace(Message, frozen=True):
    """Where followers find their leader; told to them through the job that they have in common, as
    text."""

    address: str
    secret: int

    def text(self) -> str:
        return f"{self.address} {self.secret:x}"

    @classmethod
    def parse(cls, text: str) -> "LeaderPlace":
        address, secret = text.split(" ")
        return cls(address, int(secret, 16))


class Join(Message, frozen=True):
    """First on the stream. `secret` is the instance's own (a stranger cannot join); `end`: where
    this process takes `KvPlane` messages."""

    process: int
    secret: int
    end: KvEnd | None = None


class Ready(Message, frozen=True):
    """The follower's mesh has run its warm-up."""


class Reported(Message, frozen=True):
    """How command `number` ended on this process: for pulls alone."""

    number: int
    result: StepResult


class Failed(Message, frozen=True):
    """Command `number` raised on this process. `fatal`: its mesh is broken; else the same is
    expected of every process."""

    number: int
    message: str
    fatal: bool = True


class Beat(Message, frozen=True):
    """Still here."""


class Begin(Message, frozen=True):
    """All processes are ready; from now on silence counts."""


class Ordered(Message, frozen=True):
    """Run this next. Numbers count up by one."""

    number: int
    command: StepCommand


class Stop(Message, frozen=True):
    """Finish what was ordered, then end."""


FollowerMessage = Join | Ready | Reported | Failed | Beat
LeaderMessage = Ordered | Begin | Beat | Stop
