"""The web page in a real headless Chromium: it opens, chats, shows the cluster and the decisions
and a request's timeline, on a phone's width too; what a model writes stays text; and it asks nobody
but its server."""

from pathlib import Path

import pytest

from tests import time_scale
from tests.service.doors import eventually
from tests.service.http.browser import Browser, browser
from tests.service.http.page_doors import ManyWorkers, page_door, some_workers
from tests.service.http_doors import HttpDoor, with_tokens

pytestmark = pytest.mark.ci
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
READY = "document.querySelector('#ready').textContent === 'ready'"
WIDE = "document.documentElement.scrollWidth > innerWidth"
PHONE = 360


def address(door: HttpDoor, view: str = "chat") -> str:
    return f"http://127.0.0.1:{door.port}/#/{view}"


async def say(page: Browser, text: str, tokens: int) -> None:
    await page.run(f"document.querySelector('#prompt').value = {text!r}")
    await page.run(f"document.querySelector('#max-tokens').value = {tokens}")
    await page.run("document.querySelector('#send').click()")


def ended(answers: int) -> str:
    notes = "[...document.querySelectorAll('.answer .note')]"
    return f"{notes}.filter((note) => note.textContent).length === {answers}"


async def test_the_page_chats_and_shows_cluster_decisions_and_timelines() -> None:
    path = ManyWorkers(workers=some_workers(200))
    path.filler = HOSTILE
    async with page_door(path, name="<b>tiny</b>") as door, browser() as page:
        await door.server.set_ready(True)
        await page.open(address(door))
        await page.until(READY)
        await say(page, "Hello", 4)
        await page.until(ended(1))
        text = await page.run("document.querySelector('.answer .text').textContent")
        assert text.count(HOSTILE) == 4
        assert not await page.run("document.querySelector('main img, main script, b b')")
        await page.until("document.querySelector('#live-timeline .track') !== null")
        await page.until("document.querySelectorAll('#live-timeline dd').length > 0")
        assert await page.run("document.querySelectorAll('#examples button').length") > 1
        await page.run("document.querySelector('#beside').click()")
        await page.until("/first token after/.test(document.querySelector('.beside').textContent)")
        assert len(path.requests.pop().prompt_token_ids) > 100
        await say(page, "And now?", 2)
        await page.until(ended(2))
        turns = [request.prompt_token_ids for request in path.requests]
        assert len(turns[1]) > len(turns[0]) + len(text), "the conversation goes on"
        assert "<b>tiny</b>" in await page.run("document.querySelector('#model').textContent")

        await page.run("location.hash = '/cluster'")
        await page.until("document.querySelectorAll('#pools tbody tr').length === 200")
        assert "133 workers" in await page.run("document.querySelector('#pools').textContent")
        assert "excluded" in await page.run("document.querySelector('#pools').textContent")
        assert "generated tokens" in await page.run(
            "document.querySelector('#figures').textContent"
        )
        assert await page.run("document.querySelectorAll('svg.spark').length") == 2
        await page.run("location.hash = '/decisions'")
        await page.until("document.querySelectorAll('#decision-list tbody tr').length === 2")
        shown = await page.run("document.querySelector('#decision-list').textContent")
        assert "prefill-0 → decode-1" in shown and "256 requests wait" in shown
        await page.run("location.hash = '/timelines'")
        await page.until("document.querySelectorAll('.pick').length >= 2")
        await page.run("document.querySelector('.pick').click()")
        await page.until("document.querySelector('#timeline .track') !== null")

        for view in ("chat", "cluster", "decisions", "timelines"):
            await page.open(address(door, view), PHONE, 740)
            await page.until(READY)
            assert not await page.run(WIDE), f"{view} is wider than a phone"
        assert not await page.run("window.broken")
        assert not page.errors
        ours = f"http://127.0.0.1:{door.port}/"
        outside = [url for url in page.requests if not url.startswith((ours, "data:", "about:"))]
        assert not outside


async def test_the_page_asks_for_a_token_and_completes_where_the_model_cannot_chat(
    tmp_path: Path,
) -> None:
    service = with_tokens(tmp_path, "secret")
    async with page_door(service=service, template=None) as door, browser() as page:
        await door.server.set_ready(True)
        await page.open(address(door))
        for token in ("wrong", "secret"):
            await page.until("document.querySelector('#token-dialog').open")
            await page.run(f"document.querySelector('#token').value = {token!r}")
            await page.run("document.querySelector('#token-form button').click()")
        await page.until(READY)
        await say(page, "Once", 5)
        await page.until(ended(1))
        assert await page.run("document.querySelector('.answer .text').textContent.length") == 5
        assert door.path.requests[0].prompt_token_ids == tuple(b"Once")
        await say(page, "x" * 1000, 5)
        await page.until(ended(2))
        assert "context" in await page.run(
            "[...document.querySelectorAll('.answer .note')].at(-1).textContent"
        )
        assert not page.errors


async def test_stop_ends_the_request_that_runs() -> None:
    path = ManyWorkers()
    path.gate.clear()
    async with page_door(path) as door, browser() as page:
        await door.server.set_ready(True)
        await page.open(address(door))
        await page.until(READY)
        await say(page, "Hello", 50)
        await page.until("document.querySelector('.answer .text').textContent.length === 1")
        await page.run("document.querySelector('#send').click()")
        await page.until(ended(1))
        assert await page.run("document.querySelector('.answer .note').textContent") == "stopped"
        await eventually(lambda: len(path.closed) == 1, time_scale.seconds(30))
