"""Measures the run times of a few compiled programs of a mesh, so that the router can predict times
without a description of the hardware.

Runs after warm-up and before the mesh serves, because the programs overwrite pages. Every process
of a mesh runs the same commands. Only a mesh within one process repeats short commands, because the
number of repetitions depends on the clock."""

import time
from collections.abc import Iterator

from jdisagg.costs.measured import StepTimes
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.messages.step_commands import (
    DecodeSteps,
    PrefillChunk,
    PrefillRow,
    SampleSpec,
    SlotAdmit,
    StepCommand,
)
from jdisagg.request import SamplingParams
from jdisagg.scheduler.page_ledger import pages_for

PAST_TOKENS = 1024  # earlier tokens of the chunk that measures attention
STEPS = 4  # decode steps of one measurement
SHORT_SECONDS, SHORT_RUNS = 0.05, 4  # commands that are repeated, and how often
SAMPLE = SampleSpec(0, SamplingParams(max_tokens=1, temperature=0.0))


def measure_step_times(executor: MeshExecutor) -> StepTimes:
    """Returns the times of prefill chunks of two sizes, of a chunk after earlier tokens, and of
    decode steps of two batch sizes and two contexts. Runs on the dispatch thread."""
    limits, role = executor.limits, executor.role
    room = min(limits.context_tokens, limits.pages_per_rank * limits.page_size)
    prefills = role.prefill or bool(limits.append_buckets)
    return StepTimes(
        limits.computed.chunk_buckets if prefills else (),
        tuple(_chunks(executor, room)) if prefills else (),
        limits.batch_buckets if role.decode else (),
        tuple(_steps(executor, room)) if role.decode else (),
    )


def _chunks(executor: MeshExecutor, room: int) -> Iterator[tuple[int, int, float]]:
    sizes, page = executor.limits.computed.chunk_buckets, executor.limits.page_size
    # A prefill mesh does not measure its largest chunk, which takes as long as all others together.
    # A chunk with earlier tokens needs room for one page of earlier tokens.
    largest = not executor.role.prefill and room - sizes[-1] >= page
    second = sizes[-1] if largest else sizes[max(0, len(sizes) - 2)]
    past = max(0, min(PAST_TOKENS, room - second)) // page * page

    for size, cached in dict.fromkeys(((sizes[0], 0), (second, 0), (second, past))):
        chunk = _chunk(executor, size, min(size, room - cached), cached)
        yield size, cached, _seconds(executor, chunk)


def _steps(executor: MeshExecutor, room: int) -> Iterator[tuple[int, int, float]]:
    sizes, slots = executor.limits.batch_buckets, executor.limits.slots_per_rank
    most, long = min(sizes[-1], slots), max(1, min(room - STEPS, PAST_TOKENS))
    for size, context in dict.fromkeys(((1, 1), (most, 1), (most, long))):
        yield size, context, _seconds(executor, _step(executor, size, context)) / STEPS


def _chunk(executor: MeshExecutor, size: int, count: int, past: int) -> PrefillChunk:
    limits = executor.limits
    pages = tuple(range(pages_for(past + count, limits.page_size)))
    rows = [
        PrefillRow(rank, rank, 0, (1,) * count, past, pages, (SAMPLE,))
        for rank in range(limits.ranks)
    ]
    return PrefillChunk(-1, size, tuple(rows))


def _step(executor: MeshExecutor, sequences: int, context: int) -> DecodeSteps:
    limits = executor.limits
    count = pages_for(context + STEPS, limits.page_size)
    admits = [
        SlotAdmit(
            slot,
            rank,
            slot,
            1,
            context - 1,
            context + STEPS,
            tuple((slot * count + page) % limits.pages_per_rank for page in range(count)),
            SAMPLE,
            slot,
        )
        for rank in range(limits.ranks)
        for slot in range(sequences)
    ]
    slots = (tuple(range(sequences)),) * limits.ranks
    return DecodeSteps(-1, STEPS, slots, tuple(admits))


def _seconds(executor: MeshExecutor, command: StepCommand) -> float:
    """Runs a command, several times if the mesh is in one process, and returns the seconds of the
    fastest run, because other work on the machine only adds time."""
    alone, best = not executor.programs.spans_processes, float("inf")
    for _ in range(SHORT_RUNS):
        began = time.perf_counter()
        executor.issue_and_wait(command)
        best = min(best, time.perf_counter() - began)
        if alone and best > SHORT_SECONDS:
            break
    return best
