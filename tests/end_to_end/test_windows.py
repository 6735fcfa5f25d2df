"""Models of which some layers have a window: what these keep of a sequence comes to the decode side
apart, as far as it is still seen, and goes round in a ring there. The tokens are those of
transformers, however many windows long the sequence; pages, rings and bytes on the way are those of
the KV spec."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, Mode
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.token_stream import Detokenizer
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.engine.instance import LoadModel
from jdisagg.engine.limits import GRANULE_TOKENS
from jdisagg.executor.mesh_executor import MeshRole
from jdisagg.ids import random_id
from jdisagg.layout.axes import Layout
from jdisagg.request import Request
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext
from models.checkpoint import load_config
from tests.end_to_end.clusters import (
    PATIENT,
    Running,
    config,
    dense_greedy,
    golden_copy,
    golden_greedy,
    running,
)

WINDOW = 9  # of all of these
PAGE = 4


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("gpt_oss", "tp=1", "tp=2"),
        pytest.param("gemma2", "tp=2", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gemma3", "dp=2", "tp=4", marks=pytest.mark.ci),
        pytest.param("gemma4", "tp=2", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gemma4_moe", "tp=1", "tp=2", marks=pytest.mark.slow),
    ],
)
async def test_a_sequence_many_windows_long_holds_no_more_than_one(
    name: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    directory = golden_copy(name, tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill=prefill,
        decode=decode,
        directory=directory,
        context=128,
        slots=1,
        chunk=32,
        decode_page=PAGE,
    )
    layers = load_config(directory)
    spec, layout = layers.kv_spec("float32"), Layout.parse(decode)
    _, _, replicas = layout.mesh_shape(layers.kv_heads)
    short = prompt[:5]
    async with running(sizes) as run:
        for tokens, expected in (
            (short, dense_greedy(directory, short, 30)),
            (whole[:24], whole[24:]),
            (whole[:50], whole[50:]),
        ):
            before = sum(run.cluster.channel.bytes_per_pair().values())
            done = await run.complete(
                run.request(tokens, f"r{len(tokens)}", max_tokens=len(expected), ignore_eos=True)
            )
            assert done.tokens[0] == expected
            moved = sum(run.cluster.channel.bytes_per_pair().values()) - before
            # what a window still sees fills one block of the least size, however long the prompt
            each = (
                -(-len(tokens) // GRANULE_TOKENS) * spec.unwindowed.bytes_per_token
                + spec.windowed.bytes_per_token
            ) * GRANULE_TOKENS
            assert moved == replicas * each
        executor = run.cluster.decode.executor
    limits = executor.limits
    assert limits.ring_pages * PAGE == WINDOW - 1 + PAGE
    # pages, and where rows of padding write: one page of each
    held = (limits.pages_per_rank + 1) * spec.unwindowed.bytes_per_token
    rings = (limits.state_slots_per_rank * limits.ring_pages + 1) * spec.windowed.bytes_per_token
    assert executor.pool_bytes == layout.dp * PAGE * (held + rings)


class TwoDecoders(EmbeddedCluster):
    """With a second decode mesh, on the last device and with pages of its own size, that running
    sequences move to."""

    def __init__(
        self, config: EngineConfig, load: LoadModel, detokenizer: Detokenizer, devices: list
    ) -> None:
        self._load = load, devices[-1:]
        super().__init__(config, load, detokenizer, devices[:-1])

    def _make_ports(self) -> ClusterPorts:
        ports, (load, devices) = super()._make_ports(), self._load
        config = replace(self.config.decode, layout=Layout(), page_size=8, pages_per_rank=64)
        role = MeshRole(prefill=False, decode=True)
        instance = self._instance("second", config, load(config.layout, devices), role)
        assert self.prefill
        instance.executor.expect(self.prefill.executor.card)
        prefill, self.first = self._workers
        self.second = DecodeWorker(
            WorkerContext("second", self.clock, random_id),
            self._mesh("second", instance),
            config,
            self.config.limits,
            {PREFILL: prefill, DECODE: self.first},
            self.config.mode,
        )
        self._workers.append(self.second)
        return ClusterPorts(ports.prefill, {**ports.decode, "second": self.second})

    async def move_some(self) -> None:
        """Until cancelled."""
        assert isinstance(self.first, DecodeWorker)
        while True:
            for key in list(self.first._state.groups):
                self.first.migrate_out(key)
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_mixed_requests_preempted_and_moved_give_the_tokens_of_each_alone_on_one_mesh(
    tmp_path: Path,
) -> None:
    """Greedy and seeded ones, several of a prompt, shorter and longer than the window."""
    directory = golden_copy("gpt_oss", tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill="tp=1",
        decode="dp=2",
        directory=directory,
        context=128,
        slots=6,
        chunk=32,
        decode_page=PAGE,
        pages=34,
        growth=1,
    )
    alone = config(Mode.UNIFIED, decode="tp=1", directory=directory, context=128, slots=6, chunk=32)

    def requests(run: Running) -> list[Request]:
        return [
            run.request(
                whole[: (24, 3, 31, 8, 40, 9, 53, 17)[number % 8]],
                f"r{number}",
                max_tokens=(20, 40, 30)[number % 3],
                ignore_eos=True,
                n=2 if number % 5 == 1 else 1,
                temperature=0.7 if number % 2 else 0.0,
                seed=number,
            )
            for number in range(32)
        ]

    async with running(alone, first_device=4) as run:
        expected = [(await run.complete(request)).tokens for request in requests(run)]
    assert expected[0][0] == whole[24:44]  # of transformers
    async with running(sizes, kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        moving, preemptions = asyncio.create_task(cluster.move_some()), 0
        for _ in range(6):
            done = await run.complete_all(requests(run))
            assert [one.tokens for one in done] == expected
            preemptions += sum(status.preemptions for status in await cluster.status())
            if preemptions and cluster.first.counters["sequences_moved"]:
                break
        moving.cancel()
        assert preemptions and cluster.first.counters["sequences_moved"]


@pytest.mark.ci
async def test_nothing_is_compiled_for_windows_once_it_is_warm(tmp_path: Path) -> None:
    directory = golden_copy("gpt_oss", tmp_path)
    prompt, greedy = golden_greedy(directory)
    whole = [*prompt, *greedy]
    sizes = config(
        prefill="tp=1",
        decode="tp=1",
        directory=directory,
        context=128,
        slots=1,
        chunk=16,
        warm_up=True,
    )
    async with running(replace(sizes, limits=PATIENT)) as run:
        compiled = run.cluster.compilations
        for start in (24, 40):
            request = run.request(whole[:start], f"r{start}", max_tokens=8, ignore_eos=True)
            done = await run.complete(request)
            assert done.tokens[0] == whole[start : start + 8]
        assert run.cluster.compilations == compiled
