"""This process's channel among other processes (kv_processes.py), each of which has what it has:
shared memory, NIXL."""

from jdisagg.clock import MonotonicClock
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.transfer.channel import Pull, PullTarget
from jdisagg.transfer.negotiated_channel import Memories, NegotiatedChannel
from tests import time_scale
from tests.transfer.conformance import arrives, case
from tests.transfer.kv_processes import TRANSPORTS, Block, Introduce, MakeOffer, Post, Process

PATIENCE_SECONDS = time_scale.seconds(60.0)
NO_MEMORIES = Memories()


def card(*ends: KvEnd) -> MeshCard:
    return MeshCard((1, 1, 1), (0,), (0,), ends, TRANSPORTS)


class World:
    """`memories`: this process's, closed with its channel."""

    def __init__(self, memories: Memories = NO_MEMORIES) -> None:
        self.post, self._memories = Post(), memories
        self.here = memories.end("the test", 0x7E57)
        self.channel = NegotiatedChannel(
            MonotonicClock(),
            self.here,
            self.post.of(self.here),
            transports=TRANSPORTS,
            memories=memories,
        )
        self.post.join(self.here, self.channel.handle)

    def job(self, devices: int = 4, count: int = 1) -> list[Process]:
        """`count` processes of one job, each with so many devices."""
        return self.post.start(
            devices,
            count,
            shares=self._memories.shared is not None,
            nixl=self._memories.nixl is not None,
        )

    def start(self, name: str) -> Process:
        """A process of four devices with offer 1, connected under the name."""
        (process,) = self.job()
        self.channel.connect(name, card(process.end))
        process.do(MakeOffer(1, Block("tp=4"), 0))
        assert process.answer().error == ""
        return process

    def introduce(self, process: Process) -> None:
        """From now on it can pull from "here"."""
        process.do(Introduce("here", card(self.here)))
        assert process.answer().error == ""

    def pull(self, name: str, seconds: float = PATIENCE_SECONDS) -> Pull:
        """Of what `start` offers."""
        block = case("tp=4", "tp=2")
        return self.channel.pull(1, PullTarget(block.zeros, 0, name), seconds)

    def is_pulled_from(self, name: str) -> None:
        arrives(self.pull(name), case("tp=4", "tp=2"))

    def close(self) -> None:
        self.post.close()
        self.channel.close()
