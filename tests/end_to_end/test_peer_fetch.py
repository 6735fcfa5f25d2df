"""What one prefill mesh keeps another one fetches, with real programs: between layouts that differ,
and the streams are those of a server that keeps nothing."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import jax
import msgspec
import pytest

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.engine.embedded import PREFILL, EmbeddedCluster, devices_of
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import HandoffSource, PrefillCall, PrefillPort, PrefillReply
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.step_commands import InsertBlock, PullBlock, StepCommand
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.scheduler.host_blocks import TierRoom
from tests.end_to_end.clusters import Running, assert_all_free, config, running
from tests.end_to_end.test_prefix_reuse import Conversations, decode_forgets

SECOND = "prefill-1"


class AllHinted:
    """Says of each prompt that the first prefill worker keeps all of it."""

    def __init__(self, ids: Callable[[], int]) -> None:
        self._ids = ids

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        source, known = HandoffSource(PREFILL, self._ids()), len(call.request.prompt_token_ids)
        return await proceed(msgspec.structs.replace(call, peer=source, peer_tokens=known))


class TwoPrefills(EmbeddedCluster):
    """A second prefill mesh of one device, whose worker may fetch from the first. `second_path`
    places there."""

    def __init__(
        self, config: EngineConfig, load: object, detokenizer: object, devices: Sequence[jax.Device]
    ) -> None:
        self._load, self._devices, self._detokenizer = load, devices, detokenizer
        super().__init__(config, load, detokenizer, devices)  # type: ignore[arg-type]

    def _make_ports(self) -> ClusterPorts:
        ports, settings = super()._make_ports(), self.config.prefill
        used, peer_tokens = devices_of(self.config), self.config.prefix.peer_tokens
        loaded = self._load(Layout(), self._devices[used : used + 1])  # type: ignore[operator]
        settings, peers = replace(settings, layout=Layout()), peer_tokens(settings.page_size)
        role = WorkerRole.PREFILL
        self.second = self.build(SECOND, role, settings, loaded, peers)
        self.commands: list[StepCommand] = []
        run = self.second.executor.run

        def recorded(command: StepCommand) -> object:
            self.commands.append(command)
            return run(command)

        self.second.executor.run = recorded  # type: ignore[method-assign, assignment]
        self.worker = self.add(SECOND, role, self.second, tiers=TierRoom(always=True), fetches=True)
        hinted = through(
            PrefillPort,
            self.worker,  # type: ignore[arg-type]
            AllHinted(self.local.new_id),
        )
        self.second_path = RequestPath(
            ClusterPorts({SECOND: hinted}, ports.decode),
            lambda request: TokenStream.of(self._detokenizer, request),  # type: ignore[arg-type]
            self.config.limits,
            self.clock,
        )
        return ports


def prompts(run: Running) -> list[tuple[int, ...]]:
    talk = Conversations(run, seed=3)
    return [talk.words(length) for length in (150, 70, 40)]


async def streams(run: Running, name: str) -> list[dict[int, list[int]]]:
    """One after the other."""
    found = []
    for at, ids in enumerate(prompts(run)):
        options: dict[str, object] = {"max_tokens": 12, "ignore_eos": True}
        if at == 1:
            options |= {"temperature": 0.8, "seed": 5}
        done = await run.complete(run.request(ids, f"{name} {at}", **options))
        found.append((done.tokens, done.last.usage.cached_tokens))  # type: ignore[union-attr]
    return found


@pytest.mark.ci
async def test_what_is_fetched_from_another_mesh_changes_no_token() -> None:
    async with running(config(Mode.UNIFIED, decode="tp=1")) as alone:
        expected = [tokens for tokens, _ in await streams(alone, "alone")]
    engine = config(prefill="tp=2", decode="tp=1", prefill_page=16)
    engine = replace(engine, prefix=PrefixConfig(True, 16, peer_fetch=True))
    async with running(engine, kind=TwoPrefills) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoPrefills)
        assert await streams(run, "first") == [(tokens, 0) for tokens in expected]
        decode_forgets(run)
        first_path = cluster.observed_path
        cluster.observed_path = cluster.second_path
        assert await streams(run, "second") == list(zip(expected, (144, 64, 32), strict=True))
        counters = cluster.worker.counters
        assert counters["peer_tokens_restored"] == 144 + 64 + 32
        assert counters["peer_fetch_failed"] == counters["checksums_mismatched"] == 0
        pulled = [one for one in cluster.commands if isinstance(one, PullBlock | InsertBlock)]
        assert pulled and all(one.peer.startswith(f"{PREFILL}#") for one in pulled)
        statuses = await cluster.second_path.status()
        assert all(one.free_pages == one.total_pages for one in statuses)
        cluster.observed_path = first_path
        await assert_all_free(cluster)
