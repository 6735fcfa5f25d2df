"""How many processor milliseconds does the leader of an instance of 64 processes need to send a
step command to 63 followers?

    python -m benchmarks.followers [--against=CHECKOUT] --name=followers

The leader is this project's, over real gRPC. The followers are 63 streams of one other process,
which read commands and run nothing. There are three commands, sent one at a time: a step of 128
slots on each of 16 ranks, a chunk of 512 tokens, and a block to insert. Each round starts the two
processes of each checkout in turn. A figure is the leader's processor time over 100 commands, minus
the processor time of the same seconds without commands. `benchmarks.messages` describes
`CHECKOUT`."""

import asyncio
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLLOWERS, COMMANDS, PAUSE_SECONDS = 63, 100, 0.01
LEADER, FOLLOWER = "--leader", "--follower"


class Noting:
    """Executor that runs nothing."""

    def __init__(self, commands: Any, limits: Any, card: Any) -> None:
        self._commands, self.limits, self.card = commands, limits, card

    def run(self, command: Any) -> asyncio.Future[Any]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(self._commands.Done(command.step))
        return done

    def close(self) -> None:
        pass


class Tree:
    """This checkout or an older one, from which modules are imported."""

    def __init__(self) -> None:
        sys.path.insert(0, os.getcwd())
        from jdisagg.clock import MonotonicClock
        from jdisagg.layout.kv_spec import KVSpec
        from jdisagg.layout.mesh_card import MeshCard

        try:
            self.commands: Any = importlib.import_module("jdisagg.messages.step_commands")
            self.joins: Any = importlib.import_module("jdisagg.messages.instance")
            of_mesh: Any = importlib.import_module("jdisagg.scheduler.executor")
            timing: Any = importlib.import_module("jdisagg.timeouts").InstanceTimeouts
        except ImportError:  # before the messages were the wire
            self.commands = of_mesh = importlib.import_module("jdisagg.scheduler.commands")
            self.joins = importlib.import_module("jdisagg.instance.messages")
            timing = importlib.import_module("jdisagg.instance.liveness").InstanceTiming
        self.clock = MonotonicClock()
        self.timing = timing(beat_seconds=5.0, silence_seconds=60.0)
        limits = of_mesh.MeshLimits(
            1, 16, 4, 2, 64, (64,), (1, 2), 1, 16, 4, 4, KVSpec((), "float32")
        )
        self.noting = Noting(self.commands, limits, MeshCard((1, 1, 1), (0,), (0,)))

    def step_commands(self) -> dict[str, Any]:
        from jdisagg.request import SamplingParams

        # by its path: another tree has other benchmarks
        chunk = runpy.run_path(str(ROOT / "benchmarks" / "messages.py"))["chunk"]

        commands = self.commands
        sampling = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, seed=11)
        return {
            "DecodeSteps": commands.DecodeSteps(7, 1, tuple(tuple(range(128)) for _ in range(16))),
            "PrefillChunk": chunk(commands, sampling),
            "InsertBlock": commands.InsertBlock(
                9, 2**40, 0, 3, 512, 500, 512, tuple(range(64)), 2**60
            ),
        }


async def lead() -> dict[str, float]:
    """Returns the leader's processor milliseconds per command."""
    tree = Tree()
    from jdisagg.instance.broadcast import BroadcastExecutor
    from jdisagg.instance.followers import Followers
    from jdisagg.layout.mesh_card import KvEnd
    from jdisagg.service.internal.instance_stream import InstanceServer

    followers = Followers(FOLLOWERS + 1, tree.clock, tree.timing)
    server = InstanceServer(followers)
    address = await server.start()
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, FOLLOWER, address, str(followers.secret)
    )
    try:
        await followers.all_ready(120)
        executor = BroadcastExecutor(tree.noting, followers, KvEnd("h:0", 100))

        async def seconds(command: Any) -> float:
            began = time.process_time()
            for _ in range(COMMANDS):
                if command is not None:
                    await executor.run(command)
                await asyncio.sleep(PAUSE_SECONDS)
            return time.process_time() - began

        figures = {}
        for name, command in tree.step_commands().items():
            await seconds(command)
            idle = await seconds(None)
            figures[name] = 1e3 * (await seconds(command) - idle) / COMMANDS
        followers.stop()
        await asyncio.wait_for(child.wait(), 60)
        return figures
    finally:
        if child.returncode is None:
            child.kill()
        await server.stop()


async def follow(address: str, secret: int) -> None:
    tree = Tree()
    from jdisagg.instance.follower import run_follower
    from jdisagg.layout.mesh_card import KvEnd
    from jdisagg.service.internal.instance_stream import LeaderConnection

    async def nothing() -> None:
        return

    async def one(process: int) -> None:
        join = tree.joins.Join(process, secret, KvEnd(f"h:{process}", process))
        link = LeaderConnection(address)
        await run_follower(link, join, tree.noting, nothing, tree.clock, tree.timing)

    await asyncio.gather(*(one(process) for process in range(1, FOLLOWERS + 1)))


def _run(tree: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, __file__, LEADER],
        cwd=tree, env=environment, check=True, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    from absl import flags

    from benchmarks.measure import save
    from benchmarks.two_trees import in_turn

    ours, theirs, against = in_turn(argv, _run)
    figures: dict[str, dict[str, float]] = {}
    for command in ours[0]:
        row = figures[command] = {"ours ms": _median([one[command] for one in ours], 3)}
        if theirs:
            row["other ms"] = _median([one[command] for one in theirs], 3)
            pairs = zip(ours, theirs, strict=True)
            row["other / ours"] = _median([two[command] / one[command] for one, two in pairs], 1)
        print(f"{command:14s} {row}", flush=True)
    if flags.FLAGS.name:
        saved: dict[str, object] = {"followers": FOLLOWERS, "against": against, **figures}
        print(save(flags.FLAGS.name, saved))


def _median(values: list[float], digits: int) -> float:
    return round(statistics.median(values), digits)


if __name__ == "__main__":
    if sys.argv[1:2] == [LEADER]:
        print(json.dumps(asyncio.run(lead())))
    elif sys.argv[1:2] == [FOLLOWER]:
        asyncio.run(follow(sys.argv[2], int(sys.argv[3])))
    else:
        main(sys.argv)
