"""A decode worker that fetches nothing holds back what is prefilled for itself, and nothing of the
others'."""

import asyncio

import pytest

from jdisagg.config import LimitsConfig
from jdisagg.messages.step_commands import PullBlock, StepCommand
from tests.fakes.cluster import Fleet, toy_request
from tests.fakes.fake_executor import Costs, Faults, toy_limits


@pytest.mark.parametrize("pages", [400, 64])
async def test_a_stalled_decode_worker_does_not_hold_back_anothers_hand_offs(pages: int) -> None:
    stalled = Faults(pull_error=lambda nth: "stall")
    limits = LimitsConfig(pull_seconds=20.0, max_attempts=20)
    prefill = toy_limits(pages_per_rank=pages)
    async with Fleet(
        prefills=1,
        prefill=prefill,
        limits=limits,
        faults=lambda name: stalled if name == "decode0" else Faults(),
        costs=Costs(pull=0.001),
    ) as fleet:
        loop = asyncio.get_running_loop()
        paths = [fleet.new_path(decode=name) for name in ("decode0", "decode1")]
        ended: list[float] = []

        async def ask(number: int) -> None:
            request = toy_request(number, prompt_tokens=60, max_tokens=2)
            await fleet.ask(request, paths[number % 2])
            ended.append(loop.time())

        asked = [asyncio.create_task(ask(number)) for number in range(12)]
        await asyncio.sleep(5.0)
        stuck = [command for command in fleet.processes["decode0"].mesh.log if is_pull(command)]
        assert stuck and fleet.counted("chunks_held_back") > 0, "decode0 stalls, and is noticed to"
        assert len(ended) == 6, f"{len(ended)} of decode1's six have ended"
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await fleet.check_quiet(settle_seconds=40.0)


def is_pull(command: StepCommand) -> bool:
    return isinstance(command, PullBlock)
