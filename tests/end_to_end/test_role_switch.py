"""Under load a prefill worker of a real cluster becomes a decode worker and back: no stream breaks,
every token is the one that it must be, and in the end every page is free.

tests/launch/test_role_lives.py (a real worker's lives, over gRPC) is in the lane ci;
tests/dispatch/test_role_switcher.py and tests/simulator (changes under load and deaths in them, in
virtual time) are quick."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.soak.load import known_kinds
from jdisagg.client import Client
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchState
from jdisagg.messages.worker_status import WorkerRole
from tests.end_to_end.process_clusters import all_free, cluster, launched, wait_until
from tests.end_to_end.role_switch import Change, change, load

FLAGS = (
    "--prefill_workers=2",
    "--decode_workers=2",
    "--set=model.context_tokens=512",
    "--set=instance.growth_tokens=64",
)
STEPS = ((WorkerRole.DECODE, Layout(dp=2)), (WorkerRole.PREFILL, Layout(tp=2)))


async def there_and_back(address: str) -> list[Change]:
    kinds = await known_kinds(4, tokens=(60, 150))
    async with load(address, kinds, concurrent=3) as streams:
        made = [await change(address, streams, "prefill-1", role) for role, _ in STEPS]
        await streams.until_a_new_one()
    assert not streams.wrong, streams.wrong
    assert all(one.streams_across for one in made), "no stream ran across a change"
    return made


@pytest.mark.slow
def test_a_prefill_worker_becomes_a_decode_worker_and_back_under_load(tmp_path: Path) -> None:
    with cluster(tmp_path, *FLAGS) as running:
        reports = [one.report for one in asyncio.run(there_and_back(running.address))]
        assert [(one.worker, one.state, one.role, one.layout) for one in reports] == [
            ("prefill-1", SwitchState.DONE, role, layout) for role, layout in STEPS
        ], "with the layout of the others of the role"
        assert len({one.boot_id for one in reports}) == len(STEPS)
        with Client(running.address) as client:
            wait_until(lambda: all_free(client, running.workers), "pages are not free")
            for status in client.status():
                assert status.name.startswith(status.role.value)
        switch = (f"--target={running.address}", "--worker=decode-1", "--role=prefill")
        done = launched("switch_role", *switch, "--layout=tp=1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("worker decode-1 is prefill (dp=1,tp=1,ep=1) after")
        again = launched("switch_role", *switch)
        assert again.returncode == 1 and "is a prefill worker already" in again.stderr
        assert running.end() == 0
