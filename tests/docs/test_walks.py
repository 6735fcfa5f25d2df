"""How many files the objects pass whose walks docs/architecture.md describes."""

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jdisagg.simulator.virtual_time import run_virtually
from tests.fakes.cluster import Cluster
from tests.worker.conversations import NAMES, asked, limits, prompt

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "jdisagg") + "/"


@contextmanager
def files_called(called: set[str]) -> Iterator[None]:
    """Adds the files of the package of which a function is called meanwhile."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_request_passes_as_many_files_as_the_page_says() -> None:
    """Path, router, schedulers and workers are the product's; text, meshes and channel are not."""
    called: set[str] = set()

    async def main() -> None:
        async with Cluster(
            decode=limits(pages=400), prefill=limits(pages=400), names=NAMES, wire=True
        ) as cluster:
            await cluster.ask(asked(1, prompt(100)))
            await asyncio.sleep(1.0)
            with files_called(called):
                await cluster.ask(asked(2, prompt(100, tail=5)))

    run_virtually(main)
    passed = {name for name in called if not name.startswith(("simulator/", "assembly"))}
    text = (ROOT / "docs" / "architecture.md").read_text()
    (said,) = re.findall(r"calls functions of\n?\s*(\d+) files", text)
    assert int(said) - 3 < len(passed) <= int(said), (len(passed), sorted(passed))
