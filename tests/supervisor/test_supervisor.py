"""Groups of real child processes: restarted when they end, all members together, and stopped within
their time."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.errors import ConfigError
from jdisagg.supervisor.child_process import ChildProcess, Command
from jdisagg.supervisor.supervisor import EXIT_CONFIG, GroupSpec, GroupState, SupervisedGroup

ROOT = Path(__file__).resolve().parents[2]
LIVES = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    " time.sleep(600)"
)
POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up',"
    " flush=True); time.sleep(600)"
)


class Watched:
    """A group and what was heard of it."""

    def __init__(self, *programs: str, arguments: Callable[[], tuple[str, ...]] = tuple) -> None:
        self.lines: list[tuple[str, str]] = []
        self.said: list[tuple[str, str]] = []
        self.failed: list[str] = []

        def commands() -> list[Command]:
            return [
                Command(f"member-{index}", (sys.executable, "-S", "-c", program, *arguments()))
                for index, program in enumerate(programs)
            ]

        self.group = SupervisedGroup(
            GroupSpec("group", commands),
            MonotonicClock(),
            lambda name, line: self.lines.append((name, line)),
            lambda name, text: self.said.append((name, text)),
            self.failed.append,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    def ups(self) -> int:
        return sum(line == "up" for _, line in self.lines)


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_output_comes_line_by_line_with_the_name_also_without_a_last_newline():
    watched = Watched(
        "import sys; print('a'); print('b', file=sys.stderr, flush=True); sys.stdout.write('end');"
        " sys.stdout.flush(); 1/0"
    )
    watched.group.start()
    await watched.until(
        lambda: ("member-0", "end") in [(name, line[:3]) for name, line in watched.lines]
    )
    await watched.group.stop(5)
    assert {("member-0", "a"), ("member-0", "b")} <= set(watched.lines)


async def test_a_member_that_is_killed_is_started_again_and_all_others_with_it():
    watched = Watched(LIVES, LIVES)
    watched.group.start()
    await watched.until(lambda: watched.ups() == 2)
    first = watched.group.pids
    os.kill(first[1], signal.SIGKILL)
    await watched.until(lambda: watched.ups() == 4 and watched.group.state is GroupState.RUNNING)
    second = watched.group.pids
    assert len(second) == 2 and not set(first) & set(second) and not any(map(alive, first))
    assert watched.group.restarts == 1 and any("SIGKILL" in text for _, text in watched.said)
    await watched.group.stop(5)
    assert watched.group.state is GroupState.ENDED and not any(map(alive, second))


async def test_each_start_asks_for_its_commands_anew():
    starts = iter("abc")
    watched = Watched(
        "import sys; print('got', sys.argv[1], flush=True)", arguments=lambda: (next(starts),)
    )
    watched.group.start()
    await watched.until(lambda: ("member-0", "got b") in watched.lines)
    await watched.group.stop(5)
    assert watched.lines[:2] == [("member-0", "got a"), ("member-0", "got b")]


async def test_a_polite_member_is_not_killed_and_a_stubborn_one_is_after_its_time():
    polite, stubborn = Watched(POLITE), Watched(STUBBORN)
    for watched in (polite, stubborn):
        watched.group.start()
    await polite.until(lambda: polite.ups() == 1 and stubborn.ups() == 1)
    pids = (*polite.group.pids, *stubborn.group.pids)
    await polite.group.stop(20)
    assert polite.said == []
    await stubborn.group.stop(0.2)
    assert stubborn.said == [
        ("group", "did not end within 0.2 s of SIGTERM: killed"),
        ("member-0", f"process {pids[1]} ended: SIGKILL"),
    ]
    assert not any(map(alive, pids))
    await stubborn.group.stop(1)


async def test_a_second_stop_with_less_patience_hurries_the_first():
    watched = Watched(STUBBORN)
    watched.group.start()
    await watched.until(lambda: watched.ups() == 1)
    patient = asyncio.create_task(watched.group.stop(600))
    await asyncio.sleep(0)
    await watched.group.stop(0)
    await asyncio.wait_for(patient, 10)
    assert [name for name, _ in watched.said] == ["member-0"], (
        "who was given no time did not fail to use it"
    )


@pytest.mark.parametrize("program", [f"raise SystemExit({EXIT_CONFIG})", None])
async def test_what_cannot_work_is_told_and_not_tried_again(program: str | None):
    watched = Watched(program or "")
    if program is None:
        watched.group = SupervisedGroup(
            GroupSpec("group", lambda: [Command("member-0", ("/nowhere/at/all",))]),
            MonotonicClock(),
            lambda name, line: watched.lines.append((name, line)),
            lambda name, text: watched.said.append((name, text)),
            watched.failed.append,
        )
    watched.group.start()
    await watched.until(lambda: watched.failed == ["group"])
    await watched.until(lambda: watched.group.state is GroupState.ENDED)
    assert watched.group.restarts == 0
    await watched.group.stop(1)


async def test_commands_that_cannot_be_made_are_told_and_not_tried_again():
    def nowhere() -> tuple[str, ...]:
        raise ConfigError("--host=10.0.0.1 is nowhere to listen")

    watched = Watched("", arguments=nowhere)
    watched.group.start()
    await watched.until(lambda: watched.failed == ["group"])
    await watched.group.stop(1)
    assert watched.said == [("group", "cannot be started: --host=10.0.0.1 is nowhere to listen")]


async def test_a_stop_during_the_pause_starts_nothing_more():
    watched = Watched("print('up')")
    watched.group.start()
    await watched.until(lambda: watched.group.state is GroupState.PAUSED)
    await asyncio.wait_for(watched.group.stop(60), 10)
    assert watched.group.pids == () and watched.group.state is GroupState.ENDED


@pytest.mark.parametrize("want", [errno.EAGAIN, errno.ENOSPC])
async def test_a_start_that_fails_for_want_of_processes_or_disk_is_tried_again(
    want: int, monkeypatch
):
    start, fails = asyncio.create_subprocess_exec, [0]

    async def scarce(*arguments, **options):
        if fails[0]:
            fails[0] -= 1
            raise OSError(want, os.strerror(want))
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    watched = Watched(LIVES)
    watched.group.start()
    await watched.until(lambda: watched.ups() == 1)
    fails[0] = 1
    os.kill(watched.group.pids[0], signal.SIGKILL)
    await watched.until(lambda: watched.ups() == 2)
    assert not fails[0] and not watched.failed
    await watched.group.stop(1)


async def test_nothing_is_started_after_a_stop_has_begun(monkeypatch):
    start, started = ChildProcess.start, []

    async def noting(command, take):
        started.append(command.name)
        return await start(command, take)

    monkeypatch.setattr(ChildProcess, "start", noting)
    watched = Watched(POLITE, POLITE, POLITE)
    watched.group.start()
    while not started:
        await asyncio.sleep(0)
    await watched.group.stop(5)
    assert started == ["member-0"]


async def test_a_grandchild_does_not_outlive_its_parent():
    watched = Watched(
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL); print(p.pid, flush=True); time.sleep(600)"  # noqa: E501
    )
    watched.group.start()
    await watched.until(lambda: bool(watched.lines))
    grandchild = int(watched.lines[0][1])
    assert alive(grandchild)
    await watched.group.stop(5)
    await watched.until(lambda: not alive(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_children_die_with_a_parent_that_is_killed():
    program = f"""
import asyncio, sys
from jdisagg.supervisor.child_process import ChildProcess, Command
async def main():
    child = await ChildProcess.start(Command("c", (sys.executable, "-S", "-c", {STUBBORN!r})), lambda name, line: print(child.pid, flush=True))
    await child.ended()
asyncio.run(main())
"""  # noqa: E501
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < until
        time.sleep(0.01)
