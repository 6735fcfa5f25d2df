"""Answers questions of the web page's planning guide by simulation.

The simulation runs in a child process, so that it does not block the server and can be killed if it
takes too long. While a simulation runs, other questions are rejected, unless their answers are
cached."""

import asyncio
import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

import jdisagg
from jdisagg.errors import JdisaggError, OverloadedError
from jdisagg.simulator.planning.guide import GuideQuestion, parse_question
from jdisagg.simulator.planning.guide_facts import FactsQuestion, facts

SECONDS = 60.0  # the process needs about 2 s of processor time, with the lowest priority
KEPT_ANSWERS = 64
PROGRAM = (sys.executable, "-m", "jdisagg.simulator.planning.guide")


class Guide:
    """Answers questions of the planning guide. `program`: command of the child process, which reads
    a question from stdin and writes the answer to stdout, both as JSON."""

    def __init__(self, program: Sequence[str] = PROGRAM, seconds: float = SECONDS) -> None:
        self._program = program
        self._seconds = seconds
        self._busy = False
        self._answers: OrderedDict[GuideQuestion, bytes] = OrderedDict()
        self._facts: dict[FactsQuestion, bytes] = {}

    async def answer(self, body: bytes, crowded: bool = False) -> bytes:
        """Returns the answer to a question, as JSON.

        Args:
            crowded: Whether requests are waiting at the server. If so, only cached answers are
                returned.

        Raises:
            InvalidRequestError: A field is invalid. The message names the field.
            OverloadedError: Another question is being answered, or requests are waiting.
            JdisaggError: The simulation failed or exceeded the time limit.
        """
        question = parse_question(body, GuideQuestion)
        kept = self._answers.get(question)
        if kept is not None:
            return kept
        if self._busy or crowded:
            why = "requests wait for workers" if crowded else "it answers another question"
            raise OverloadedError(
                f"the guide does not simulate now: {why}; ask again", retry_after_seconds=1.0
            )
        self._busy = True
        try:
            answer = await self._simulated(body)
        finally:
            self._busy = False
        self._answers[question] = answer
        if len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def facts(self, body: bytes) -> bytes:
        """Answers are cached. Raises InvalidRequestError for invalid fields."""
        question = parse_question(body, FactsQuestion)
        if question not in self._facts:
            self._facts[question] = msgspec.json.encode(facts(question))
        return self._facts[question]

    async def _simulated(self, body: bytes) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *self._program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(),
        )
        try:
            async with asyncio.timeout(self._seconds):
                answer, _ = await process.communicate(body or b"{}")
        except TimeoutError:
            raise JdisaggError(
                f"the guide's simulation was not done within {self._seconds:g} s; ask for less"
            ) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise JdisaggError(f"the guide's simulation ended with {process.returncode}")
        return answer


def _environment() -> dict[str, str]:
    here = str(Path(jdisagg.__file__).resolve().parents[1])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
