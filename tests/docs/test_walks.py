"""How many files the objects pass whose walks docs/architecture.md describes."""

import asyncio
import gc
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jdisagg.messages.ports import HandoffEnd
from jdisagg.simulator.virtual_time import run_virtually
from jdisagg.transfer.negotiated_channel import Memories
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.worker.kv_sources import RestoreQuery
from tests.fakes.cluster import Cluster
from tests.transfer.conformance import case, finished, settled
from tests.transfer.loopback import Loopback, Pair
from tests.worker.conversations import NAMES, asked, limits, prompt
from tests.worker.receiving import Receiving, blocks, sums
from tests.worker.tiers import host, other

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "jdisagg") + "/"


@contextmanager
def files_called(called: set[str]) -> Iterator[None]:
    """Adds the files of the package of which a function is called meanwhile, also by threads that
    are started meanwhile."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def said(pattern: str) -> int:
    """Returns the number that the page has in this place."""
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    (number,) = re.findall(pattern, text)
    return int(number)


def check(called: set[str], most: int) -> None:
    passed = {name for name in called if not name.startswith(("simulator/", "assembly"))}
    assert most - 3 < len(passed) <= most, f"{len(passed)}: {sorted(passed)}"


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
    check(called, said(r"calls functions of (\d+) files"))


def test_a_block_passes_as_many_files_as_the_page_says() -> None:
    """Its receiver's worker, and the channel between two processes; not the meshes."""
    called: set[str] = set()

    async def receive() -> None:
        channel, offers = blocks(10)
        messages = [*offers, *sums(channel, offers), HandoffEnd(6, 10, ())]
        receiving = Receiving(channel, messages, verify=True)
        with files_called(called):
            await receiving.receive()
            await asyncio.sleep(0.1)

    run_virtually(receive)
    block, moved = case("tp=1", "tp=1"), set[str]()
    with files_called(moved):
        pair = Pair.of(Loopback(), Memories(SharedMemory()), Memories(SharedMemory()))
        pair.sender.offer(1, block.block, 0)
        finished(pair.ends.pull(1, block)).arrays()
        settled(lambda: pair.receiver.under_way() == 0)
        moved.clear()  # what only the first block needs
        pair.sender.offer(2, block.block, 0)
        finished(pair.ends.pull(2, block)).arrays()
        pair.sender.release(2)
        settled(lambda: gc.collect() >= 0 and pair.quiet())
    pair.close()
    check(called | moved, said(r"a block passes (\d+) files"))


def test_a_hit_passes_as_many_files_as_the_page_says() -> None:
    """From the names of its blocks to the blocks in pages; the schedulers are those of a
    request."""
    called: set[str] = set()

    async def main() -> None:
        async with host() as cluster:
            for number in range(3):
                await cluster.ask(other(number))
            sources, request = cluster.prefill._sources, other(0)
            with files_called(called):
                chain = sources.kept.chain(request, request.prompt_token_ids)
                known = sources.kept.match(0, chain)
                plan = sources.best(RestoreQuery(chain, (known,)))
                assert plan is not None
                await sources.restore(plan)
            assert cluster.prefill.counters["host_blocks_restored"] > 0

    run_virtually(main)
    check(called, said(r"a hit in host memory passes (\d+) files"))
