"""A decode mesh prefills the uncached part of the next turn itself, with real programs: in one
process between different layouts and page sizes, and in processes. The streams are those of a
server without a prefix cache."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jdisagg.config import EngineConfig, PrefixConfig
from jdisagg.dispatch.token_stream import Detokenizer
from jdisagg.engine.embedded import DECODE, PREFILL, EmbeddedCluster
from jdisagg.engine.replica import LoadModel
from jdisagg.messages.step_commands import PrefillChunk, StepCommand
from jdisagg.model_api import Device
from jdisagg.router.cluster_state import Description
from tests.end_to_end.clusters import running
from tests.end_to_end.conversations import Conversations, reference
from tests.router.fleets import H100
from tests.shapes import config
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
