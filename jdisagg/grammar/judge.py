"""Says whether a grammar is fit to be compiled in a process that serves: it is tried in a child
process first (`trial.py`), which a hostile grammar may bring down."""

import asyncio
import signal
import sys
from pathlib import Path

from jdisagg.grammar.trial import MEMORY_BYTES, PROCESSOR_SECONDS

TRIAL = str(Path(__file__).with_name("trial.py"))


async def judge(text: str, seconds: float) -> str:
    """What is wrong with a grammar as llguidance writes it down; empty where nothing is. Raises
    TimeoutError where that is not known within `seconds`: the machine is busy, since the child has
    less of a processor."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", TRIAL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(seconds):
            said, _ = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return said.decode("utf-8", "replace")
    if process.returncode == -signal.SIGPROF:
        return f"compiling it takes more than {PROCESSOR_SECONDS:g} s of a processor; simplify it"
    return (
        f"compiling it takes more than {MEMORY_BYTES >> 20} MiB, or it is nested too deeply;"
        " simplify it"
    )
