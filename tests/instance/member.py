"""One process of an instance, run as `python -m tests.instance.member '<json>'`; not a test.

The leader runs a script of commands over the whole instance and writes what came to a file; a
follower obeys."""

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jdisagg.clock import MonotonicClock
from jdisagg.config import Mode
from jdisagg.engine.limits import mesh_limits, stage_cut
from jdisagg.errors import UnavailableError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.program_cache import use_compilation_cache
from jdisagg.executor.programs import Programs
from jdisagg.instance.processes import ProcessGroup, join_instance
from jdisagg.messages.step_commands import (
    HOST,
    DecodeResult,
    DecodeSteps,
    ExtractBlock,
    ExtractResult,
    InsertBlock,
    InsertResult,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    PullBlock,
    PullResult,
    ReleaseOffers,
    SampleSpec,
    SlotAdmit,
)
from jdisagg.node.instance_group import follow, lead
from jdisagg.request import SamplingParams
from jdisagg.scheduler.executor import Executor
from jdisagg.transfer.in_process import InProcessChannel
from models.checkpoint import load_model
from tests.shapes import CHUNK, PREFILL_PAGE, instance

CONTEXT = 256
PAGES = CONTEXT // PREFILL_PAGE  # of a sequence


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process is told. `steps`: decode steps after the prefill; none: decode until the
    instance fails."""

    model: str
    layout: str
    result: str
    cache: str
    process: int = 0
    processes: int = 1
    coordinator: str = ""
    devices: int = 4
    steps: int = 24


def build(task: Task) -> MeshExecutor:
    config = instance(task.layout)
    layout = config.layout
    cut = stage_cut(layout.pp, layout.pp) if layout.pp > 1 else None
    loaded = load_model(task.model, layout, jax.devices()[: layout.devices], cut=cut)
    limits = mesh_limits(config, Mode.CHUNKED, loaded.model.kv_spec, CONTEXT, layout.pp)
    role = MeshRole(prefill=True, decode=True)
    made = (loaded.model, Programs(*loaded.meshes), layout, limits, role)
    return MeshExecutor("member", *made, InProcessChannel(MonotonicClock()))


async def prefill(executor: Executor, specs: Sequence[SampleSpec]) -> list[int]:
    """A sequence for each spec, dealt out to the ranks; every prompt is longer than a chunk.
    Returns the first tokens."""
    ranks = executor.limits.ranks
    results = []
    for start in (0, CHUNK):
        for index, spec in enumerate(specs):
            prompt = tuple(range(30 + index, 30 + index + CHUNK + 10 + index))
            tokens, samples = prompt[start : start + CHUNK], (spec,) if start else ()
            place = (index, index % ranks, 0)
            row = PrefillRow(*place, tokens, start, pages_of(index, ranks), samples)
            results.append(executor.run(PrefillChunk(len(results), CHUNK, (row,))))
    found = await asyncio.gather(*results)
    sampled = [result for result in found if isinstance(result, PrefillResult)]
    return [sample.token for result in sampled for sample in result.samples]


def pages_of(index: int, ranks: int) -> tuple[int, ...]:
    each = PAGES // 2
    return tuple(range(index // ranks * each, (index // ranks + 1) * each))


async def decode(
    executor: Executor, specs: Sequence[SampleSpec], first: Sequence[int], steps: int
) -> list[DecodeResult]:
    """All sequences at once, several commands under way."""
    ranks = executor.limits.ranks
    admits = []
    for i, spec in enumerate(specs):
        place, tokens = (i, i % ranks, i // ranks), (first[i], CHUNK + 10 + i, CONTEXT // 2)
        admits.append(SlotAdmit(*place, *tokens, pages_of(i, ranks), spec))
    slots = tuple(tuple(range((len(specs) - rank + ranks - 1) // ranks)) for rank in range(ranks))
    commands = [
        DecodeSteps(step, 4, slots, tuple(admits) if step == 0 else ())
        for step in range(steps // 4)
    ]
    results = await asyncio.gather(*(executor.run(command) for command in commands))
    return [result for result in results if isinstance(result, DecodeResult)]


async def script(executor: Executor, steps: int) -> dict[str, object]:
    greedy = SamplingParams(temperature=0.0, max_tokens=64)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=64, logprobs=2)
    specs = [SampleSpec(0, params, (), 0, (), ()) for params in (greedy, sampled, greedy)]
    first = await prefill(executor, specs)
    results = await decode(executor, specs, first, steps)
    rows = [row for result in results for rank in result.logprobs for row in rank]
    logprobs = [one.logprob for row in rows for one in row if one is not None]
    return {
        "first": first,
        "tokens": [result.tokens for result in results],
        "logprobs": logprobs,
        "through_host": await through_host(executor),
    }


async def through_host(executor: Executor) -> list[bool]:
    """Copies the first block of each rank and layer group to host memory and back to other pages.
    Returns whether the KV is the same, and whether a block that is not there is missed by all
    processes."""
    same: list[bool] = []
    elsewhere = tuple(range(2 * PAGES, 2 * PAGES + CHUNK // PREFILL_PAGE))
    ranks, groups = range(executor.limits.ranks), range(executor.limits.layer_groups)
    for offer, (rank, group) in enumerate(itertools.product(ranks, groups)):
        pages = pages_of(rank, len(ranks))[: CHUNK // PREFILL_PAGE]
        out = ExtractBlock(1, offer, rank, group, 0, CHUNK, CHUNK, pages, 7, 1, to_host=True)
        pull = PullBlock(2, offer, rank, group, CHUNK, 60.0, HOST, groups=1)
        into = InsertBlock(3, offer, rank, group, CHUNK, CHUNK, 0, elsewhere, 7, groups=1)
        # the copy may still run when the pull is issued
        copied, pulled = await asyncio.gather(executor.run(out), executor.run(pull))
        assert isinstance(copied, ExtractResult) and isinstance(pulled, PullResult)
        inserted = await executor.run(into)
        assert isinstance(inserted, InsertResult)
        same.append(not pulled.error and inserted.checksum == copied.checksum.checksum)
        await executor.run(ReleaseOffers(4, (offer,), from_host=True))
        again = await executor.run(pull)
        assert isinstance(again, PullResult)
        same.append(bool(again.error))
    return same


async def until_failure(executor: Executor) -> dict[str, object]:
    slots = ((0,),) * executor.limits.ranks
    for step in range(1_000_000):
        try:
            await executor.run(DecodeSteps(step, 1, slots))
        except UnavailableError as error:
            return {"failure": error.message}
        await asyncio.sleep(0.01)
    raise AssertionError("it never failed")


async def main(task: Task, group: ProcessGroup) -> None:
    clock = MonotonicClock()
    if not group.leads:
        executor = build(task)
        await follow(group, executor, lambda: warm(executor), clock)
        return
    leading = await lead(group, clock)
    local = build(task)
    await warm(local)
    executor = await leading.over(local)
    if task.steps:
        write(task, await script(executor, task.steps))
        await leading.stop()
        await asyncio.to_thread(executor.close)
    else:
        write(task, {"ready": True})
        write(task, await until_failure(executor))
        await asyncio.sleep(60)  # it is ended


async def warm(executor: MeshExecutor) -> None:
    await executor.on_dispatch_thread(executor.warm_updates)


def write(task: Task, what: dict[str, object]) -> None:
    """Whole or not at all."""
    path = Path(task.result)
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    its_task = Task(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING)
    jax.config.update("jax_num_cpu_devices", its_task.devices)
    use_compilation_cache(its_task.cache)
    its_group = (
        join_instance(its_task.coordinator, its_task.processes, its_task.process)
        if its_task.processes > 1
        else ProcessGroup(0, 1)
    )
    try:
        asyncio.run(main(its_task, its_group))
    except UnavailableError as failure:
        print(failure.message, file=sys.stderr, flush=True)
        os._exit(1)
    its_group.leave()
