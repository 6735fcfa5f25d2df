"""A decode mesh prefills the uncached part of the next turn itself, with real programs: in one
process between different layouts and page sizes, and in processes. The streams are those of a
server without a prefix cache."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.client import Client
from jdisagg.config import EngineConfig, PrefixConfig
from jdisagg.dispatch.token_stream import Detokenizer
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.engine.replica import LoadModel
from jdisagg.messages.step_commands import PrefillChunk, StepCommand
from jdisagg.model_api import Device
from jdisagg.router.cluster_state import Description
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.end_to_end.clusters import dense_greedy, running
from tests.end_to_end.conversations import Conversations, reference
from tests.end_to_end.process_clusters import PROMPT, all_free, cluster, wait_until
from tests.router.fleets import H100
from tests.shapes import LLAMA, config
from tests.worker.appends import SLOW

APPEND = 48
WAVES, REQUESTS = 4, 4


class Priced(EmbeddedCluster):
    """Its router predicts seconds, and takes the prefill mesh for a slow one."""

    def __init__(
        self,
        config: EngineConfig,
        load: LoadModel,
        detokenizer: Detokenizer,
        devices: Sequence[Device],
    ) -> None:
        super().__init__(config, load, detokenizer, devices)
        self.describe({PREFILL: Description("r/h", SLOW), DECODE: Description("r/h", H100)})


def appended(commands: Sequence[StepCommand]) -> list[int]:
    """Tokens of each row that a mesh computed."""
    return [
        len(row.tokens) for one in commands if isinstance(one, PrefillChunk) for row in one.rows
    ]


@pytest.mark.ci
async def test_what_the_decode_mesh_appends_changes_no_token() -> None:
    """Turns with n > 1, penalties, seeds and stops, several at once, beside running streams."""
    engine = replace(config(), prefix=PrefixConfig(True, 16, append_tokens=APPEND))
    engine = replace(engine, routing=replace(engine.routing, hold_seconds=1e9, local_gain=0.0))
    streams = []
    async with running(engine, kind=Priced) as run:
        talk = Conversations(run, seed=11)
        for _ in range(WAVES):
            asked = talk.wave(REQUESTS)
            done = await run.complete_all(asked)
            talk.heard(asked, done)
            streams += [(one.tokens, one.text, one.finish) for one in done]
        computed = appended(run.recording.decode)
        assert computed and max(computed) <= APPEND
        assert max(appended(run.recording.prefill)) > APPEND
        counters = run.cluster._workers[1].counters
        assert counters["tokens_appended"] == sum(computed)
    assert streams == await reference()


@pytest.mark.ci
async def test_nothing_is_compiled_after_warm_up_where_the_decode_mesh_appends() -> None:
    engine = replace(config(warm_up=True), prefix=PrefixConfig(True, 16, append_tokens=APPEND))
    async with running(engine) as run:
        talk, before = Conversations(run, seed=2), run.cluster.compilations
        history = talk.words(100)
        for turn in range(4):
            done = await run.complete(
                run.request(history, f"turn {turn}", max_tokens=24, ignore_eos=True)
            )
            history += (*done.tokens[0], *talk.words((3, 10, 5, 1)[turn]))
            while any(one.attempts for one in run.cluster.path.placer.status().accounts):
                await asyncio.sleep(0.01)
        assert run.cluster._workers[1].counters["prompts_appended"] == 3
        assert run.cluster.compilations == before


@pytest.mark.ci
def test_in_a_cluster_of_processes_the_next_turn_is_appended(tmp_path: Path) -> None:
    """The router learns from heartbeats what the decode worker keeps."""
    tokenizer = Tokenizer.from_directory(LLAMA)
    # Too long to be appended while nothing of it is kept.
    first = tokenizer.encode((PROMPT + " there was a dog who lived in the forest with a cat") * 6)
    assert len(first) > 64
    with (
        cluster(
            tmp_path,
            "--prefill_workers=1",
            "--decode_workers=1",
            "--prefix_cache",
            "--append_tokens=64",
            "--set=prefix.grain_tokens=16",
        ) as served,
        Client(served.address) as client,
    ):
        said, turns = list(first), 0
        # news of what is kept come to the router with heartbeats
        until = time.monotonic() + time_scale.seconds(60.0)
        while not any(one.kind == "local" for one in client.routing().decisions):
            assert time.monotonic() < until, client.routing().decisions
            answer = client.complete(
                token_ids=said[-400:], max_tokens=8, ignore_eos=True, temperature=0
            )
            tokens = answer.choices[0].token_ids
            assert tokens == dense_greedy(LLAMA, said[-400:], 8)
            said, turns = [*said, *tokens, *tokenizer.encode(" and")], turns + 1
            time.sleep(0.2)
        assert turns > 1, "nothing was kept at first"
        wait_until(lambda: all_free(client, served.workers), "pages are not free once all is quiet")
