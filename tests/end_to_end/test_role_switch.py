"""Under load a prefill worker of a real cluster becomes a decode worker and back, and a decode
worker a prefill worker and back: no stream breaks, every token is the one that it must be, and in
the end every page is free.

Five processes and their compilations: all of it is slow. What runs by default is
tests/launch/test_role_lives.py (a real worker's lives, over gRPC),
tests/dispatch/test_role_switcher.py and tests/simulator (changes under load, in virtual time)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.soak.load import Kind, known_kinds
from jdisagg.client import AsyncClient, Client
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.role_services import cluster_roles
from tests import time_scale
from tests.end_to_end.process_clusters import (
    RunningCluster,
    all_free,
    cluster,
    launched,
    wait_until,
)
from tests.end_to_end.role_switch import Change, change, load

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
CONCURRENT = 3
FLAGS = (
    "--prefill_workers=2",
    "--decode_workers=2",
    "--set=model.context_tokens=512",
    "--set=instance.growth_tokens=64",
)

pytestmark = [pytest.mark.ci, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roles")


@pytest.fixture(scope="module")
def kinds() -> list[Kind]:
    return asyncio.run(known_kinds(4, tokens=(60, 150)))


async def changes(
    running: RunningCluster,
    kinds: list[Kind],
    steps: Sequence[tuple[str, WorkerRole, Layout | None]],
) -> list[Change]:
    """Makes all of them under one load, and holds every stream against its oracle."""
    async with load(running.address, kinds, CONCURRENT) as streams:
        made = [await change(running.address, streams, *step) for step in steps]
        await streams.until_a_new_one()
    assert not streams.wrong, streams.wrong
    assert all(one.streams_across for one in made), "no stream ran across a change"
    return made


def check_quiet(running: RunningCluster) -> dict[str, str]:
    """All pages are free again; which worker is what."""
    with Client(running.address) as client:
        wait_until(
            lambda: all_free(client, running.workers), "pages are not free once all is quiet"
        )
        return {status.name: status.role.value for status in client.status()}


def check_there_and_back(
    running: RunningCluster,
    kinds: list[Kind],
    steps: Sequence[tuple[str, WorkerRole, Layout | None]],
) -> None:
    made = asyncio.run(changes(running, kinds, steps))
    for one, (name, role, _) in zip(made, steps, strict=True):
        assert (one.report.worker, one.report.state, one.report.role) == (
            name,
            SwitchState.DONE,
            role,
        ), one.report
        assert one.report.layout == (Layout(dp=2) if role is DECODE else Layout(tp=2)), (
            "as the others of the role"
        )
    assert len({one.report.boot_id for one in made}) == len(steps)
    assert check_quiet(running) == {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }


def test_a_prefill_worker_becomes_a_decode_worker_and_back_under_load(
    folder: Path, kinds: list[Kind]
) -> None:
    with cluster(folder, *FLAGS) as running:
        check_there_and_back(
            running, kinds, [("prefill-1", DECODE, None), ("prefill-1", PREFILL, None)]
        )
        change = (f"--target={running.address}", "--worker=decode-1", "--role=prefill")
        done = launched("switch_role", *change, "--layout=tp=1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("worker decode-1 is prefill (dp=1,tp=1,ep=1) after")
        again = launched("switch_role", *change)
        assert again.returncode == 1 and "is a prefill worker already" in again.stderr
        assert running.end() == 0


async def until_prefill_workers(
    running: RunningCluster, kinds: Sequence[Kind], wanted: int
) -> None:
    """Keeps a load up until the router has made so many workers prefill."""
    async with (
        AsyncClient(running.address, connect_seconds=30.0) as client,
        load(running.address, kinds, 16) as streams,
        asyncio.timeout(time_scale.seconds(180)),
    ):
        while True:
            taking = [status.role for status in await client.status() if not status.draining]
            if len(taking) == len(running.workers) and taking.count(PREFILL) == wanted:
                break
            await asyncio.sleep(0.1)
    assert not streams.wrong, streams.wrong


def test_with_elastic_the_controller_moves_a_worker_to_where_the_load_is_and_back(
    folder: Path,
) -> None:
    settings = ("window_seconds=20", "patience_seconds=4", "cooldown_seconds=5")
    settings += ("slo.ttft_seconds=0.1", "slo.tpot_seconds=5")
    given = ("--elastic", "--set=warm_up=True", *(f"--set=elastic.{one}" for one in settings))
    prompts = asyncio.run(known_kinds(2, tokens=(3,), prompts=(400, 450)))
    answers = asyncio.run(known_kinds(2, tokens=(300,), prompts=(8, 12)))
    with cluster(folder, *FLAGS, *given) as running:
        for kinds, prefill in ((prompts, 3), (answers, 2)):
            asyncio.run(until_prefill_workers(running, kinds, prefill))
        check_quiet(running)
        assert running.end() == 0


def test_a_worker_that_is_killed_while_it_changes_comes_back_and_no_stream_breaks(
    folder: Path, kinds: list[Kind]
) -> None:
    with cluster(folder, *FLAGS) as running:

        async def main() -> None:
            async with load(running.address, kinds, CONCURRENT) as streams:
                await streams.until_under_way(3)
                async with cluster_roles(running.address) as roles:
                    changing = asyncio.create_task(
                        roles.switch("decode-1", PREFILL, deadline_seconds=90.0)
                    )
                    await asyncio.sleep(0.15)
                    victim = running.worker("decode-1")
                    assert victim is not None and not changing.done()
                    victim.kill()
                    report = await changing
                assert report.state is SwitchState.FAILED and report.role is DECODE, (
                    "it is started again as its command line says"
                )
            assert not streams.wrong, streams.wrong

        asyncio.run(main())
        assert check_quiet(running)["decode-1"] == "decode"
