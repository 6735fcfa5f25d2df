"""A real headless Chromium, by its debugging protocol over a pair of pipes; no package is needed
for it, only the program."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import time_scale

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_SECONDS = 60.0
# Chromium reads its pipe from 3 and writes to 4.
AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted, inheritable=True)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str:
    """The program; skips the test where there is none."""
    for name in PROGRAMS:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no Chromium is installed here: apt-get install chromium")


@dataclass
class Browser:
    """One page. `requests`: every address that it asked for; `errors`: what its scripts threw and
    what its content security policy refused."""

    writer: asyncio.StreamWriter
    session: str = ""
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(answer, time_scale.seconds(ANSWER_SECONDS))

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits until an expression is true in the page; returns its value."""
        async with asyncio.timeout(time_scale.seconds(ANSWER_SECONDS)):
            while not (value := await self.run(condition)):
                await asyncio.sleep(0.05)
        return value

    async def open(self, address: str, width: int = 1280, height: int = 860) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call("Page.navigate", url=address)
        await self.until(
            f"document.readyState === 'complete' && location.href === {json.dumps(address)}"
        )

    def take(self, message: dict[str, Any]) -> None:
        if (number := message.get("id")) is not None:
            if "error" in message:
                self._answers[number].set_exception(RuntimeError(str(message["error"])))
            else:
                self._answers[number].set_result(message["result"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.errors.append(entry["text"])


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A page of a Chromium of its own, in a profile of its own."""
    program, folder = chromium(), tempfile.mkdtemp(prefix="jdisagg-browser-")
    their_input, our_output = os.pipe()
    our_input, their_output = os.pipe()
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        " --disable-extensions --disable-background-networking --remote-debugging-pipe"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", AS_3_AND_4, str(their_input), str(their_output), program]
        + [*flags.split(), f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(their_input, their_output),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for end in (their_input, their_output):
        os.close(end)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_input, "rb")
    )
    outgoing, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(our_output, "wb")
    )
    page = Browser(asyncio.StreamWriter(outgoing, protocol, reader, loop))
    listening = asyncio.create_task(_listen(reader, page))
    try:
        target = (await page.call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await page.call("Target.attachToTarget", targetId=target, flatten=True)
        page.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        yield page
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        incoming.close()
        outgoing.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        shutil.rmtree(folder, ignore_errors=True)


async def _listen(reader: asyncio.StreamReader, page: Browser) -> None:
    while True:
        data = await reader.readuntil(b"\0")
        page.take(json.loads(data[:-1]))
