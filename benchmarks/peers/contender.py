"""A peer's engine as a contender of `benchmarks.throughput`: the seconds of a prefill, of a decode
step and of a batch, from the times of its tokens. Checks that its tokens equal ours, and that one
engine was idle while the other worked."""

import asyncio
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.link import Peer
from jdisagg.errors import ConfigError

DRIVERS = {"vllm": Path(__file__).with_name("vllm_driver.py")}
# At rest is who uses less than this part of a core.
RESTING, LOOK_SECONDS, SETTLE_LOOKS = 0.1, 0.25, 20
Tokens = list[list[int]]


def step_seconds(times: Sequence[Sequence[float]]) -> float:
    """Returns the seconds of a decode step while all streams decode, from the times of each
    stream's tokens."""
    low = max(stream[2] for stream in times)
    high = min(stream[-2] for stream in times)
    inside = [when for when in times[0] if low <= when <= high]
    # Tokens of one dispatch come at one instant: those that came with the first instant took their
    # time before it.
    return (inside[-1] - inside[0]) / sum(when > inside[0] for when in inside)


def check_same(ours: Tokens, theirs: Tokens) -> None:
    """Raises `ConfigError` if greedy streams differ, because then two different models would be
    compared."""
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own != other:
            places = (at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
            at = next(places, min(len(own), len(other)))
            raise ConfigError(
                f"the peer's greedy tokens in float32 are not ours: prompt {number}, token {at},"
                f" {other[at : at + 1]} where we have {own[at : at + 1]}; both must serve one model"
            )


class PeerEngine:
    """A peer's engine. `started`: the driver's description of itself. While the peer works, our
    event loop keeps running, because our engine would otherwise report its mesh as broken after
    some minutes."""

    def __init__(self, peer: Peer, **start: object) -> None:
        self._peer = peer
        self.started = peer.ask("start", **start)
        # Processor seconds and wall seconds of each while the other has its turn.
        self._theirs, self._our_turns, self._ours, self._their_turns = 0.0, 0.0, 0.0, 0.0
        self._left = (time.perf_counter(), peer.cpu_seconds())

    async def first_seconds(self, prompt: np.ndarray) -> float:
        return (await asyncio.to_thread(self._generate, prompt[None], 1))["seconds"]

    async def batch(self, prompts: np.ndarray, count: int) -> tuple[float, float, Tokens]:
        """Returns the seconds for all prompts, the seconds of a decode step while all run, and the
        tokens."""
        answer = await asyncio.to_thread(self._generate, prompts, count)
        return answer["seconds"], step_seconds(answer["times"]), answer["tokens"]

    async def tokens(self, prompts: np.ndarray, count: int) -> Tokens:
        return (await asyncio.to_thread(self._generate, prompts, count))["tokens"]

    def busy(self) -> dict[str, float]:
        """Returns the number of cores that each engine used while the other one was measured.
        Values near 0 mean an undisturbed measurement."""
        return {
            "theirs in our turns": round(self._theirs / max(self._our_turns, 1e-9), 3),
            "ours in their turns": round(self._ours / max(self._their_turns, 1e-9), 3),
        }

    def _generate(self, prompts: np.ndarray, count: int) -> dict:
        began, before, own = time.perf_counter(), self._peer.cpu_seconds(), _own_cpu_seconds()
        self._theirs += before - self._left[1]
        self._our_turns += began - self._left[0]
        answer = self._peer.ask("generate", prompts=prompts.tolist(), tokens=count)
        self._ours += _own_cpu_seconds() - own
        self._settle()
        self._left = (time.perf_counter(), self._peer.cpu_seconds())
        self._their_turns += self._left[0] - began
        return answer

    def _settle(self) -> None:
        """Waits until the peer is idle. Some engines spin for a second after their last step, on a
        core that our measurement needs."""
        for _ in range(SETTLE_LOOKS):
            before = self._peer.cpu_seconds()
            time.sleep(LOOK_SECONDS)
            if self._peer.cpu_seconds() - before <= RESTING * LOOK_SECONDS:
                return


def _own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
