"""How long a command may run before its mesh counts as failed."""

import asyncio

import pytest

from jdisagg.messages.step_commands import PrefillChunk, PrefillRow, StepCommand, StepResult
from jdisagg.prompt.images import PromptImage
from jdisagg.worker.step_loop import StepLoop


class Hangs:
    """An executor that ends no command."""

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("patches", "most"), [(0, 10), (1024, 15), (16384, 90)])
async def test_a_chunk_may_run_longer_the_larger_its_images_are(patches: int, most: int) -> None:
    now = 0.0
    loop = StepLoop(Hangs(), lambda _: None, lambda *_: None, lambda _: None, lambda: now)  # type: ignore[arg-type]
    image = PromptImage(0, 1, (1, 4, patches // 4), b"", bytes(32))
    row = PrefillRow(0, 0, 0, (7,), 0, (0,), images=(image,) if patches else ())
    loop.submit(PrefillChunk(1, 16, (row,)))
    now = most - 0.1
    loop.break_if_stalled(10.0)
    assert loop.failure is None
    now = most + 0.1
    loop.break_if_stalled(10.0)
    assert loop.failure and f"did not end within {most} s" in loop.failure.message
