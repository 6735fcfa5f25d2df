"""Clusters whose instances have two processes each, dense and with experts spread over all devices,
give the answers of `jdisagg generate`."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchCall
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.role_services import worker_roles
from tests.end_to_end.process_clusters import PROMPT, RunningCluster, ask, cluster, launched
from tests.programs import CACHE_FLAG
from tests.shapes import LLAMA, MOE

pytestmark = pytest.mark.ci

TOKENS = 48


def generated(folder: Path, model: Path, prefill: str, decode: str) -> str:
    """The same in one process, by the launcher."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    layouts = (f"--prefill={prefill}", f"--decode={decode}", "--page_size=16")
    asked = (f"--model={model}", f"--prompt={PROMPT}", f"--max_tokens={TOKENS}", "--ignore_eos")
    ended = launched("generate", *asked, *layouts, CACHE_FLAG, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


async def check_role_stays(running: RunningCluster) -> None:
    """The leader refuses, and says what helps. (Through the router the last worker of a role stays
    anyway.)"""
    said = re.search(
        r"prefill worker prefill-0 .*serves on (127\.0\.0\.1:\d+)", running.log.read_text()
    )
    assert said
    async with worker_roles(said[1]) as port:
        with pytest.raises(
            ConfigError, match="its instance has 2 processes.*start it in the other role"
        ):
            await port.switch_role(SwitchCall(1, WorkerRole.DECODE, Layout(tp=4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(LLAMA, "tp=4", "dp=2,tp=2", id="dense"),
        pytest.param(MOE, "tp=4,ep=4", "dp=4,ep=4", id="experts"),
        pytest.param(LLAMA, "pp=2,tp=2", "pp=2,dp=2", id="stages"),
    ],
)
def test_instances_of_two_processes_each_say_what_one_process_says(
    tmp_path: Path, model: Path, prefill: str, decode: str
):
    expected = generated(tmp_path, model, prefill, decode)
    assert len(expected) > TOKENS
    layouts = (f"--model={model}", f"--prefill={prefill}", f"--decode={decode}")
    with cluster(
        tmp_path,
        "--prefill_workers=1",
        "--decode_workers=1",
        "--processes_per_instance=2",
        *layouts,
    ) as running:
        assert len(running.pids()) == 6, "a parent, a router, and two processes for each instance"
        answer = ask(running, f"--max_tokens={TOKENS}", "--ignore_eos", "--temperature=0")
        assert (answer.returncode, answer.stdout) == (0, expected), answer.stderr
        asyncio.run(check_role_stays(running))
        assert running.end() == 0, running.log.read_text()
