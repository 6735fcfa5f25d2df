"""How a server ends that does not serve yet."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import time_scale

ROOT = Path(__file__).resolve().parents[2]
# launch.serve as it is, but for the engine: what compiles here is a thread that does not let itself
# be interrupted either.
SERVE = """
import asyncio, sys, time
from types import SimpleNamespace
from launch import console, serve

class Compiling:
    def __init__(self, *_):
        self.cluster = SimpleNamespace(stop=self.stop, path=SimpleNamespace(placing=None))
    async def stop(self):
        pass
    async def start(self, **_):
        print("compiling", flush=True)
        await asyncio.to_thread(time.sleep, 60)

serve.deployment_of = Compiling
sys.argv = ["serve", "--port=0", "--http_port=-1"]
console.run(serve.main, serve.flags)
"""


@pytest.mark.ci
def test_a_server_that_still_compiles_ends_at_once_and_without_a_word_at_either_signal() -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process, number in zip(started, (signal.SIGINT, signal.SIGTERM), strict=True):
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line == "compiling\n", process.stderr.read()
            process.send_signal(number)
            out, err = process.communicate(timeout=time_scale.seconds(10))
        finally:
            process.kill()
        assert (process.returncode, out, err) == (128 + number, "", "")
