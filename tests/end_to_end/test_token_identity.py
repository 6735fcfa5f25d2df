"""Rule 1 over everything else: any mix of requests in a batch, mode, preemption, swapping and steps
per dispatch give the streams of each request alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.messages.step_commands import DecodeSteps, InsertBlock, PrefillChunk
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.mixed_requests import SENTENCE, mixed_requests, reference, streams
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.shapes import FEW_PAGES, config

HITS = ("prefix_hit_tokens", (("tier", "pages"),))


async def all_at_once(engine: object) -> tuple[list[object], Running]:
    async with running(engine) as run:  # type: ignore[arg-type]
        return streams(await run.complete_all(mixed_requests(run))), run


@pytest.mark.ci
async def test_the_requests_really_are_mixed():
    result = await reference()
    assert len(result) == 32
    assert any(len(tokens) == 2 for tokens, _, _ in result)
    assert len({str(tokens) for tokens, _, _ in result}) == 32


@pytest.mark.ci
async def test_all_at_once_on_two_meshes_gives_the_same_streams():
    engine = config(
        Mode.DISAGGREGATED,
        "tp=2",
        "dp=2,tp=2",
        prefill_page=8,
        decode_page=16,
        block_bytes=64 << 10,
        chunk=128,  # blocks of 16 tokens with all layers, and of 128
    )
    result, run = await all_at_once(engine)
    assert result == await reference()
    assert {
        command.groups for command in run.recording.decode if isinstance(command, InsertBlock)
    } == {1, 2}
    assert decoded_while_chunks_landed(run), (
        "no decode step ran between the inserts of one prompt: nothing was overlapped"
    )


def decoded_while_chunks_landed(run: Running) -> bool:
    """Whether decode steps ran between two insertions of KV, and prefill chunks between two parts
    of one prompt's hand-off."""
    kinds = [
        type(command)
        for command in run.recording.decode
        if isinstance(command, InsertBlock | DecodeSteps)
    ]
    inserts = [index for index, kind in enumerate(kinds) if kind is InsertBlock]
    chunks = sum(isinstance(command, PrefillChunk) for command in run.recording.prefill)
    return chunks > 4 and DecodeSteps in kinds[inserts[0] : inserts[-1]]


async def outgrow_their_pages(
    run: Running, enough: Callable[[], bool] = lambda: True
) -> tuple[list[Collected], int]:
    """All `mixed_requests` at once, and how often pages were taken. Short prompts first: many
    sequences then grow at once, and together outgrow their pages."""
    requests = mixed_requests(run)
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_token_ids))
    shortest_first = [requests[index] for index in order]
    last, preemptions = await run.complete_preempted(shortest_first, enough=enough)
    completed = dict(zip(order, last, strict=True))
    return [completed[index] for index in range(len(requests))], preemptions


@pytest.mark.ci
@pytest.mark.parametrize(
    ("engine", "host_gib"),
    first_ci(
        [
            (config(**FEW_PAGES), 0.25),
            (config(Mode.CHUNKED, decode="pp=2", steps=4, **FEW_PAGES), 0.0),
            (config(prefill="pp=2", decode="pp=2", **FEW_PAGES), 0.25),
        ]
    ),
    ids=("two meshes", "one mesh", "stages"),
)
async def test_preemption_changes_no_stream(engine: EngineConfig, host_gib: float) -> None:
    """With a cache, preempted sequences find their blocks in pages and host memory."""
    prefix = PrefixConfig(host_gib > 0, 16, host_gib=host_gib, restores="always")
    async with running(replace(engine, prefix=prefix)) as run:
        counters = run.cluster._workers[-1].counters
        enough = lambda: not host_gib or counters["host_blocks_restored"] > 0  # noqa: E731
        done, preemptions = await outgrow_their_pages(run, enough)
        assert counters["host_blocks_broken"] == 0
    noticed = sum(one.timings.preemptions for one in done if one.timings)
    assert 0 < noticed <= preemptions  # a child may be preempted just when its stop string ends it
    assert streams(done) == await reference()


@pytest.mark.ci
async def test_a_suspended_request_goes_on_with_the_tokens_of_an_undisturbed_one():
    engine = replace(config(), prefix=PrefixConfig(True, 16, host_gib=0.25, restores="always"))
    async with running(engine) as run:
        options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 5}
        request = run.request(SENTENCE, "rests", repetition_penalty=1.2, **options)
        undisturbed = await run.complete(replace(request, request_id="first", cache_scope="other"))
        tokens: list[int] = []
        async for event in run.cluster.stream(request):
            tokens += event.token_ids
            if len(tokens) == 10:
                await run.cluster.suspend("rests")
                (status,) = [one for one in await run.cluster.status() if one.name == "decode-0"]
                assert status.free_pages == status.total_pages and status.running == 0
                others = [run.request(SENTENCE, f"other {n}", max_tokens=5) for n in range(3)]
                await run.complete_all(others)
                counters = run.cluster._workers[-1].counters
                before = counters.labelled()[HITS]
                run.cluster.resume("rests")
        assert counters.labelled()[HITS] - before >= 16
    assert tokens == undisturbed.tokens[0]
