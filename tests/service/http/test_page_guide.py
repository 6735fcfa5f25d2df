"""The guide behind the web page: a process of its own answers, one question at a time, within
bounds, and not while requests wait."""

import asyncio
import os
import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from jdisagg.config import ServiceConfig
from jdisagg.errors import JdisaggError, OverloadedError
from jdisagg.node.guide import Guide
from jdisagg.simulator.planning.guide import GUIDE_INSTANCES, GuideQuestion, parse_question
from jdisagg.simulator.planning.guide_facts import GUIDE_HARDWARE, GUIDE_LINKS, GUIDE_MODELS
from tests.service.http.page_doors import page_door

HERE = f"{sys.executable} -c".split()
ECHO = (*HERE, "import sys; sys.stdout.write(sys.stdin.read())")
NEVER = (*HERE, "import time; time.sleep(3600)")
BROKEN = (*HERE, "raise SystemExit(7)")


def waiting_for(pipe: Path) -> tuple[str, ...]:
    """Answers when somebody has written to the pipe."""
    return (*HERE, f"print(open({str(pipe)!r}).read())")


async def test_one_question_is_answered_at_a_time_and_answers_are_kept(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    guide = Guide(waiting_for(pipe))
    first = asyncio.create_task(guide.answer(b'{"rate": 2}'))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="another question"):
        await guide.answer(b'{"rate": 3}')
    await asyncio.to_thread(pipe.write_text, "an answer")
    assert await first == b"an answer\n"
    assert await guide.answer(b'{"rate": 2.0}', crowded=True) == b"an answer\n"


async def test_a_question_waits_while_requests_do() -> None:
    with pytest.raises(OverloadedError, match="requests wait"):
        await Guide(ECHO).answer(b"{}", crowded=True)


@pytest.mark.parametrize("program, said", [(NEVER, "within 0.2 s"), (BROKEN, "ended with 7")])
async def test_a_simulation_that_does_not_end_well_is_an_error_and_leaves_nothing(
    program: tuple[str, ...], said: str
) -> None:
    guide = Guide(program, seconds=0.2 if program is NEVER else 60.0)
    for _ in range(2):
        with pytest.raises(JdisaggError, match=said):
            await guide.answer(b"{}")


async def test_a_client_that_goes_away_ends_the_simulation() -> None:
    guide = Guide(NEVER)
    asking = asyncio.create_task(guide.answer(b"{}"))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    with pytest.raises(JdisaggError, match="ended with 7"):
        guide._program = BROKEN
        await guide.answer(b"{}")


async def test_the_door_answers_refuses_and_may_have_no_guide() -> None:
    async with page_door(waiting=0) as door:
        assert (await door.ask("/api/status")).fields["guide"] is True
        answer = await door.ask("/api/guide", {"rate": 0.5, "prompt_tokens": 256})
        assert [way["mode"] for way in answer.fields["ways"]][0] == "unified"
        facts = await door.ask("/api/guide/facts", {"model": "deepseek-v3"})
        assert facts.fields["kv_bytes_per_token"] == 61 * (512 + 64) * 2
        unknown = await door.ask("/api/guide/facts", {"model": "gpt-7"})
        assert unknown.status == 400 and "model" in unknown.error["message"]
        wrong = await door.ask("/api/guide", {"rate": 1e9})
        assert wrong.status == 400 and "rate" in wrong.error["message"]
    async with page_door(waiting=1) as door:
        busy = await door.ask("/api/guide", {})
        assert busy.status == 429 and busy.headers["retry-after"] == "1"
    async with page_door(service=ServiceConfig(http_guide=False)) as door:
        assert (await door.ask("/api/status")).fields["guide"] is False
        for path in ("/api/guide", "/api/guide/facts"):
            assert (await door.ask(path, {})).status == 404


def test_the_page_offers_the_guides_own_choices() -> None:
    index = (files("jdisagg.service.http") / "web" / "index.html").read_text()
    choices = {
        name: tuple(re.findall(r'<option value="([^"]+)"', body))
        for name, body in re.findall(r'<select id="guide-(\w+)">(.*?)</select>', index, re.DOTALL)
    }
    assert choices == {
        "model": tuple(GUIDE_MODELS),
        "hardware": GUIDE_HARDWARE,
        "instances": tuple(str(number) for number in GUIDE_INSTANCES),
        "link": GUIDE_LINKS,
    }


def test_every_value_of_the_pages_sliders_can_be_asked_for() -> None:
    script = (files("jdisagg.service.http") / "web" / "guide.js").read_text()
    sliders = re.findall(r'"(\w+_\w+|rate)",\s*\[([\d., ]+)\]', script)
    assert len(sliders) == 6
    for name, values in sliders:
        for value in values.split(","):
            question = parse_question(f'{{"{name}": {value}}}'.encode(), GuideQuestion)
            assert getattr(question, name) == float(value)
