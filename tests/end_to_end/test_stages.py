"""Rule 1 over pipeline stages: any number of stages on either side of a hand-off gives the streams
of one device, with other tp, dp and page sizes, moves and preemption.

The shipped model has four layers, so that three stages have one, two and one. Storms, tiers,
drafts and grammars over stages are cases of the tests that are about them."""

import asyncio
import itertools
from pathlib import Path

import pytest

from jdisagg.client import Client
from jdisagg.config import EngineConfig, Mode
from jdisagg.errors import ConfigError
from models.tokenizer import Tokenizer
from tests.end_to_end.clusters import (
    PROMPT,
    check,
    check_continuations,
    dense_greedy,
    golden_copy,
    running,
)
from tests.end_to_end.mixed_requests import mixed_requests, reference, streams
from tests.end_to_end.process_clusters import all_free, cluster, wait_until
from tests.end_to_end.two_decoders import TwoDecoders
from tests.lanes import first_ci
from tests.shapes import LLAMA, MOE, config

ci, slow = pytest.mark.ci, pytest.mark.slow
LAYERS = 4


def staged(
    prefill: str, decode: str, mode: Mode = Mode.DISAGGREGATED, **sizes: int
) -> EngineConfig:
    pages = {"prefill_page": 8, "decode_page": 16, "chunk": 16} | sizes
    return config(mode, prefill, decode, layer_groups=LAYERS, **pages)  # type: ignore[arg-type]


PAIRS = [
    (f"pp={here}{more}", f"pp={there}{also}")
    for (here, there), more, also in itertools.product(
        itertools.product(range(1, 5), repeat=2), ("", ",tp=2"), ("", ",dp=2")
    )
    if here * (1 + bool(more)) + there * (1 + bool(also)) <= 8
]


@ci
@pytest.mark.parametrize(("prefill", "decode"), first_ci([("pp=2,tp=2", "pp=3"), ("tp=2", "pp=2")]))
async def test_stages_give_the_tokens_of_a_dense_pass_and_move_the_bytes_of_the_kv(
    prefill: str, decode: str
) -> None:
    await check(staged(prefill, decode))


@slow
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_every_pair_of_stages_gives_the_tokens_of_a_dense_pass(
    prefill: str, decode: str
) -> None:
    await check(staged(prefill, decode, chunk=64, prefill_page=16, decode_page=8))


@ci
async def test_stages_of_one_pool_give_the_tokens_of_a_dense_pass() -> None:
    await check(config(Mode.CHUNKED, decode="pp=3", chunk=16))


@ci
async def test_experts_in_stages_give_the_tokens_of_a_dense_pass() -> None:
    engine = config(prefill="pp=2,tp=2,ep=2", decode="pp=2,dp=2,ep=2", directory=MOE)
    await check(engine)


@ci
async def test_a_family_with_other_first_layers_gives_its_tokens(tmp_path: Path) -> None:
    """Latent attention, and a dense layer before those with experts."""
    directory = golden_copy("deepseek_v3", tmp_path)
    sizes = {"directory": directory, "context": 128, "slots": 4, "chunk": 32, "layer_groups": 3}
    async with running(config(prefill="pp=3", decode="pp=2,tp=2,ep=2", **sizes)) as run:  # type: ignore[arg-type]
        await check_continuations(run, directory, (24, 51, 40))


@ci
@pytest.mark.parametrize(
    ("mode", "prefill", "decode", "steps"),
    [
        (Mode.DISAGGREGATED, "pp=2", "pp=3", 1),
        pytest.param(Mode.CHUNKED, "tp=1", "pp=2,dp=2", 4, marks=slow),
    ],
)
async def test_mixed_requests_all_at_once_give_the_streams_of_each_alone(
    mode: Mode, prefill: str, decode: str, steps: int
) -> None:
    """Batches of several stages are in turn; sequences come and go in each."""
    async with running(staged(prefill, decode, mode, chunk=64, steps=steps)) as run:
        assert streams(await run.complete_all(mixed_requests(run))) == await reference()


@ci
async def test_sequences_that_move_between_stages_and_one_mesh_give_the_streams_of_each_alone() -> (
    None
):
    """Too few pages, and moves from two stages to a mesh with one."""
    storm = staged("pp=2", "pp=2", chunk=64, decode_page=8, pages=58, growth=1, slots=16)
    async with running(storm, kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        moving = asyncio.create_task(cluster.move_some())
        done, preemptions = await run.complete_preempted(
            mixed_requests(run), enough=lambda: cluster.first.counters["sequences_moved"] > 0
        )
        moving.cancel()
    assert preemptions > 0
    assert streams(done) == await reference()


async def test_more_stages_than_layers_are_refused_before_weights_are_read() -> None:
    with pytest.raises(ConfigError, match="pp=5 exceeds the 4 groups of layers"):
        async with running(staged("pp=5", "tp=1")):
            pass


@ci
def test_stages_of_workers_in_processes_hand_over_between_each_other(tmp_path: Path) -> None:
    """Receivers name the pieces of every stage by the devices of the first one."""
    prompt = Tokenizer.from_directory(LLAMA).encode(PROMPT)
    with (
        cluster(
            tmp_path,
            "--prefill_workers=1",
            "--decode_workers=1",
            "--prefill=pp=2,tp=2",
            "--decode=pp=3",
        ) as served,
        Client(served.address) as client,
    ):
        for start in (len(prompt), 20, 30):
            asked = prompt[:start]
            answer = client.complete(token_ids=asked, max_tokens=20, ignore_eos=True, temperature=0)
            assert answer.choices[0].token_ids == dense_greedy(LLAMA, asked, 20)
        wait_until(lambda: all_free(client, served.workers), "pages are not free once all is quiet")
