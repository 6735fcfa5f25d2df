"""A server that a notebook starts, as its cells see it; a script stands for the program that it
starts, and says what that says."""

import os
import signal
import sys

import pytest

from jdisagg.errors import ConfigError, DeadlineExceededError
from launch.notebook_server import start_server
from tests.time_scale import seconds

SERVES = """
import signal, sys
from jdisagg.observe.foreign_lines import wrapped
print("compiled 1 of 2 programs", file=sys.stderr, flush=True)
line = f"jdisagg serves {sys.argv[1]} (unified) on 127.0.0.1:1 and http://127.0.0.1:2"
print(wrapped(line, "serve", 0.0) if sys.argv[2] == "json" else line, flush=True)
signal.pause()
"""
REFUSES = "import sys; sys.exit('error: ' + sys.argv[1] + ' is no layout')"
WAITS = "print('still compiling', flush=True); import signal; signal.pause()"


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_it_is_there_when_it_serves_and_gone_when_it_was_stopped(log_format: str) -> None:
    asked = ("my llama", log_format)
    server = await start_server(*asked, program=program(SERVES), seconds=seconds(60))
    assert (server.url, server.target, server.model) == (
        "http://127.0.0.1:2",
        "127.0.0.1:1",
        "my llama",
    )
    os.kill(server._process.pid, 0)
    await server.stop()
    assert server._process.status == -signal.SIGTERM
    await server.stop()  # a cell may run twice


async def test_one_that_cannot_serve_says_why() -> None:
    with pytest.raises(ConfigError, match="status 1 before .*\n.*tp=3 is no layout"):
        await start_server("tp=3", program=program(REFUSES), seconds=seconds(60))


async def test_one_that_does_not_come_to_serve_is_stopped() -> None:
    with pytest.raises(DeadlineExceededError, match=r"within 0\.5 s; give it more"):
        await start_server(program=program(WAITS), seconds=0.5)


@pytest.mark.ci
async def test_flags_are_those_of_the_server() -> None:
    with pytest.raises(ConfigError, match="no_such_flag"):
        await start_server("--no_such_flag=1", seconds=seconds(120))
