"""Measures KV transfers: between two processes on one device, and into the pages of an engine that
decodes. The processes share the device's memory (`XLA_PYTHON_CLIENT_MEM_FRACTION`), so they run
before this process uses the device."""

import os
import statistics
import sys
import time
from functools import partial

from msgspec.structs import replace

from benchmarks.device_day.day import Day, Figures, run_whole
from benchmarks.device_day.engine import GREEDY, Engine, Sizes
from jdisagg.messages.step_commands import (
    ConnectPeer,
    DecodeSteps,
    InsertBlock,
    InsertResult,
    OfferSpec,
    PrefillResult,
    PullBlock,
    PullResult,
    ReleaseOffers,
)

KEY, PEER = 0x1234567890ABCDEF, "gpu-day#1"


def run(day: Day) -> None:
    for channel in ("memory",) if day.small else ("engine", "memory"):
        day.row(f"between two processes, {channel}", partial(processes, day, channel), shares=True)
    engines: list[Engine] = []

    def build() -> Figures:
        layers, chunk = (2, 128) if day.small else (32, 2048)
        engines.append(Engine(Sizes("llama-3-8b", layers, 8, 4 * chunk, chunk, day.small)))
        return {"weights GB": engines[0].weight_bytes / 1e9}

    day.row("engine", build)
    if engines:
        day.row("handed off: sums equal", partial(handed_off, engines[0]))
        day.row("decode beside insertions", partial(stall, engines[0]))
        engines.pop().close()


def processes(day: Day, channel: str) -> Figures:
    """Runs `benchmarks.handoff`: pulled, inserted and overlapped transfers, compared with the bare
    transfer engine."""
    megabytes, rounds = ("0.5", "1") if day.small else ("16,64,256", "5")
    command = (
        *(sys.executable, "-m", "benchmarks.handoff", f"--channel={channel}"),
        *(f"--megabytes={megabytes}", f"--rounds={rounds}", "--pairs=tp=1>tp=1", "--hidden=4"),
    )
    return {"lines": [line for line in said(day, command).splitlines() if "GB/s" in line]}


def said(day: Day, command: tuple[str, ...]) -> str:
    """Runs a command that leaves room on the device for a second process, and returns its
    output."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}
    log = day.out / "handoff.log"
    status = run_whole(command, environment, day.left, log)
    text = log.read_text()
    if status:
        raise RuntimeError(f"{command[2]} ended with {status}: {text[-1500:]}")
    return text


def blocks_of(engine: Engine, tokens: int) -> list[OfferSpec]:
    """Returns the blocks of a prompt of the largest bucket, cut as in serving."""
    bands = engine.executor.limits.bands(tokens)
    return [OfferSpec(100 + i, b.start, 0, tokens, len(b)) for i, b in enumerate(bands)]


def handed_off(engine: Engine) -> Figures:
    """Computes a prompt's KV, offers, pulls and inserts it into other pages, and checks that the
    checksums are equal."""
    executor, tokens = engine.executor, engine.sizes.chunk
    executor.issue_and_wait(ConnectPeer(0, PEER, executor.card))
    offers = blocks_of(engine, tokens)
    chunk = engine.chunk((tokens,))
    rows = (replace(chunk.rows[0], offers=tuple(offers)),)
    result = executor.issue_and_wait(replace(chunk, rows=rows, checksum_key=KEY))
    assert isinstance(result, PrefillResult)
    born = {item.offer_id: item.checksum for item in result.checksums}
    found = {offer.offer_id: inserted(engine, offer, tokens) for offer in offers}
    executor.issue_and_wait(ReleaseOffers(9, tuple(born)))
    if found != born:
        raise AssertionError("a block's sum in its new pages is not the one it was born with")
    return {"blocks": len(offers), "equal": len(found)}


def inserted(engine: Engine, offer: OfferSpec, tokens: int) -> int:
    """Inserts an offered block into the second sequence's pages and returns the checksum."""
    pull = PullBlock(2, offer.offer_id, 0, offer.group, tokens, 30.0, PEER, groups=offer.groups)
    pulled = engine.executor.issue_and_wait(pull)
    assert isinstance(pulled, PullResult)
    assert not pulled.error, pulled.error
    result = engine.executor.issue_and_wait(insertion(engine, offer, tokens))
    assert isinstance(result, InsertResult)
    assert result.intact
    return result.checksum


def insertion(engine: Engine, offer: OfferSpec, tokens: int) -> InsertBlock:
    pages = engine.pages(1)[: -(-tokens // engine.executor.limits.page_size)]
    return InsertBlock(
        3, offer.offer_id, 0, offer.group, tokens, tokens, 0, pages, KEY, PEER, groups=offer.groups
    )


def stall(engine: Engine) -> Figures:
    """Returns the milliseconds by which a decode step is delayed if a block is inserted before it,
    with sequences in slots 2 and above."""
    executor, tokens = engine.executor, engine.sizes.chunk
    slots = tuple(range(2, engine.sizes.batch))
    admits = tuple(
        admit for admit in engine.admits(engine.sizes.batch, tokens, GREEDY) if admit.slot in slots
    )
    step = DecodeSteps(1, 1, (slots,))
    executor.issue_and_wait(DecodeSteps(1, 1, (slots,), admits))
    offer = blocks_of(engine, tokens)[0]
    chunk = engine.chunk((tokens,))
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    for number in range(12):
        this = replace(offer, offer_id=1000 + number)
        rows = (replace(chunk.rows[0], offers=(this,)),)
        executor.issue_and_wait(replace(chunk, rows=rows, checksum_key=KEY))
        pull = PullBlock(2, this.offer_id, 0, this.group, tokens, 30.0, PEER, groups=this.groups)
        executor.issue_and_wait(pull)
        for name in times:
            started = time.perf_counter()
            if name == "beside":
                executor._issue(insertion(engine, this, tokens))
            executor.issue_and_wait(step)
            times[name].append(time.perf_counter() - started)
        executor.issue_and_wait(ReleaseOffers(9, (this.offer_id,)))
    medians = {name: 1e3 * statistics.median(found[2:]) for name, found in times.items()}
    return {
        "step ms": medians["alone"],
        "step with a block ms": medians["beside"],
        "block MB": tokens
        * executor.limits.kv_spec.bytes_per_token
        / len(blocks_of(engine, tokens))
        / 1e6,
    }
