"""Measures the run times of a few compiled programs of a mesh, so that the router can predict times
without a description of the hardware.

Runs after warm-up and while no command runs, because the programs overwrite pages. Every process
of a mesh runs the same commands. Only a mesh within one process repeats short commands, because the
number of repetitions depends on the clock."""

import time
from collections.abc import Iterator, Sequence

from jdisagg.costs.measured import StepTimes
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.messages.step_commands import (
    DecodeSteps,
    PrefillChunk,
    PrefillRow,
    SampleSpec,
    SlotAdmit,
    StepCommand,
)
from jdisagg.request import SamplingParams
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import pages_for

PAST_TOKENS = 1024  # earlier tokens of the chunk that measures attention
STEPS = 4  # decode steps of one measurement
SHORT_SECONDS, SHORT_RUNS = 0.05, 4  # commands that are repeated, and how often
SAMPLE = SampleSpec(0, SamplingParams(max_tokens=1, temperature=0.0))


# pages of each dp rank
Pages = Sequence[Sequence[int]]


def measured_tokens(limits: MeshLimits) -> int:
    """Returns the number of positions for which the measurement needs pages on each dp rank."""
    most = max(limits.chunk_buckets[-1], STEPS) + PAST_TOKENS
    return min(most, limits.context_tokens, limits.pages_per_rank * limits.page_size)


def measure_step_times(
    executor: MeshExecutor, role: MeshRole, pages: Pages | None = None
) -> StepTimes:
    """Returns the times of prefill chunks of two sizes, of a chunk after earlier tokens, and of
    decode steps of two batch sizes and two contexts. Runs on the dispatch thread.

    Args:
        role: What the worker does with the mesh.
        pages: Pages that are overwritten, for `measured_tokens` positions or fewer. None: all.
    """
    limits = executor.limits
    if pages is None:
        pages = (range(limits.pages_per_rank),) * limits.ranks
    room = min(limits.context_tokens, len(pages[0]) * limits.page_size)
    prefills = role.prefill or bool(limits.append_buckets)
    return StepTimes(
        limits.computed_by(role.prefill).chunk_buckets if prefills else (),
        tuple(_chunks(executor, role, room, pages)) if prefills else (),
        limits.batch_buckets if role.decode else (),
        tuple(_steps(executor, room, pages)) if role.decode else (),
    )


def _chunks(
    executor: MeshExecutor, role: MeshRole, room: int, pages: Pages
) -> Iterator[tuple[int, int, float]]:
    sizes = executor.limits.computed_by(role.prefill).chunk_buckets
    page = executor.limits.page_size
    # A prefill mesh does not measure its largest chunk, which takes as long as all others together.
    # A chunk with earlier tokens needs room for one page of earlier tokens.
    largest = not role.prefill and room - sizes[-1] >= page
    second = sizes[-1] if largest else sizes[max(0, len(sizes) - 2)]
    past = max(0, min(PAST_TOKENS, room - second)) // page * page

    for size, cached in dict.fromkeys(((sizes[0], 0), (second, 0), (second, past))):
        chunk = _chunk(executor, size, min(size, room - cached), cached, pages)
        yield size, cached, _seconds(executor, chunk)


def _steps(executor: MeshExecutor, room: int, pages: Pages) -> Iterator[tuple[int, int, float]]:
    sizes, slots = executor.limits.batch_buckets, executor.limits.slots_per_rank
    most, long = min(sizes[-1], slots), max(1, min(room - STEPS, PAST_TOKENS))
    for size, context in dict.fromkeys(((1, 1), (most, 1), (most, long))):
        yield size, context, _seconds(executor, _step(executor, size, context, pages)) / STEPS


def _chunk(executor: MeshExecutor, size: int, count: int, past: int, pages: Pages) -> PrefillChunk:
    needed = pages_for(past + count, executor.limits.page_size)
    rows = [
        PrefillRow(rank, rank, 0, (1,) * count, past, tuple(own[:needed]), (SAMPLE,))
        for rank, own in enumerate(pages)
    ]
    return PrefillChunk(-1, size, tuple(rows))


def _step(executor: MeshExecutor, sequences: int, context: int, pages: Pages) -> DecodeSteps:
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
            tuple(own[(slot * count + page) % len(own)] for page in range(count)),
            SAMPLE,
            slot,
        )
        for rank, own in enumerate(pages)
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
