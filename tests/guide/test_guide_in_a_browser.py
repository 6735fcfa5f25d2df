"""The guide's page in a real headless Chromium: it draws three modes, follows its controls, fits a
phone's width, and asks nobody but its server."""

import json

import pytest

from tests.guide.guide_server import guide_server
from tests.service.http.browser import browser

pytestmark = pytest.mark.ci
WIDE = "document.documentElement.scrollWidth > innerWidth"


async def test_the_guide_draws_three_modes_and_follows_its_sliders() -> None:
    with guide_server() as server:
        async with browser() as page:
            await page.open(server.url, 360, 740)
            await page.until("document.querySelectorAll('.way .lane').length > 60")
            before = await page.run("document.querySelector('#ways').textContent")
            await page.run("document.querySelector('#guide-rate').value = 0")
            await page.run(
                "document.querySelector('#guide-rate').dispatchEvent("
                "new Event('input', {bubbles: true}))"
            )
            await page.until(
                f"document.querySelector('#ways').textContent !== {json.dumps(before)}"
                " && document.querySelector('#guide-said').textContent === ''"
            )
            assert await page.run("document.querySelector('#guide-rate-said').textContent") == (
                "0.5 requests/s"
            )
            assert await page.run("document.querySelectorAll('#guide-advice tbody tr').length") == 3
            assert await page.run("document.querySelectorAll('.kv-bars li').length") == 7
            assert await page.run("document.querySelectorAll('svg.chart').length") == 2
            await page.run(
                "document.querySelector('.lanes').dispatchEvent("
                "new KeyboardEvent('keydown', {key: 'ArrowDown'}))"
            )
            about = await page.run("document.querySelector('.way .about').textContent")
            assert about.startswith("Request 1: ")
            assert not await page.run(WIDE)
            assert not page.errors
            ours = (server.url, "data:", "about:")
            assert not [url for url in page.requests if not url.startswith(ours)]
