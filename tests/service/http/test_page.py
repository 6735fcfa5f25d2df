"""The web page without a browser: its files ask nobody else and parse no HTML, its JSON says what
GetStatus says to whom GetStatus says it, and a request's timeline is found by its trace."""

import re
from dataclasses import asdict
from importlib.resources import files

from jdisagg.client import AsyncClient
from tests.service.doors import eventually
from tests.service.http.page_doors import (
    PLACED,
    REFUSED,
    TRACE,
    TRACEPARENT,
    ManyWorkers,
    page_door,
)
from tests.service.http_doors import COMPLETIONS, request, with_tokens

WEB = files("jdisagg.service.http") / "web"
FILES = {file.name: file.read_text() for file in WEB.iterdir()}
JSON_PATHS = ("/api/status", "/api/timelines", f"/api/timelines/{TRACE}")


async def test_the_page_and_all_files_that_it_names_are_served() -> None:
    async with page_door() as door:
        index = await door.ask("/")
        assert (index.status, index.body.decode()) == (200, FILES["index.html"])
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        pages = {name for name in FILES if name.endswith(".html")}
        named = {
            name
            for page in pages
            for name in re.findall(r'(?:src|href)="web/([^"]+)"', FILES[page])
        }
        todo = [*named]
        while todo:
            imported = set(re.findall(r'from "\./([^"]+)"', FILES[todo.pop()]))
            todo += imported - named
            named |= imported
        assert named | pages == set(FILES) == named | {"index.html", "docs.html"}
        kinds = {"js": "text/javascript", "css": "text/css"}
        for name in named:
            answer = await door.ask(f"/web/{name}")
            assert (answer.status, answer.body.decode()) == (200, FILES[name])
            assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        for path in ("/web/", "/web/nothing.js", "/web/..%2fpage.py", "/web/page.py"):
            answer = await door.ask(path)
            assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_the_pages_files_name_no_other_address_and_turn_no_text_into_html_or_code() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc"
    guide = files("jdisagg.guide") / "web"
    for name, text in [*FILES.items(), *((one.name, one.read_text()) for one in guide.iterdir())]:
        assert not re.search(r"https?:|[\"'(]//|@import|wss?:", text), name
        assert not (name.endswith(".js") and re.search(ways, text)), name
        for path in re.findall(r"(?:src|href)=\"([^\"]*)\"", text):
            assert path.startswith("web/") or path in ("data:,", "./", "openapi.json")
    index = FILES["index.html"]  # the content security policy would refuse its own scripts
    assert not re.search(r"<style|\sstyle=|\son\w+=", index)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", index) == [""]


async def test_the_page_may_ask_this_server_alone_and_stand_in_no_other_page() -> None:
    async with page_door() as door:
        for path in ("/", "/web/main.js"):
            headers = (await door.ask(path)).headers
            policy = dict(
                part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
            assert headers["x-content-type-options"] == "nosniff"


async def test_the_status_says_what_get_status_says() -> None:
    async with page_door() as door, AsyncClient(door.target) as client:
        await door.server.set_ready(True)
        status = (await door.ask("/api/status")).fields
        workers, routing = await client.status(), await client.routing()
    assert status["ready"] is True and status["waiting"] == routing.waiting == 7
    assert [worker["name"] for worker in status["workers"]] == [one.name for one in workers]
    second, told = status["workers"][1], workers[1]
    assert (second["role"], second["layout"]) == ("decode", told.layout)
    assert (second["running"], second["slots"]) == (told.running, told.slots)
    assert second["pages"] == [
        {"free": 3, "reserved": 1, "used": 4},
        {"free": 4, "reserved": 0, "used": 4},
    ]
    assert (second["attempts"], second["barred_seconds"]) == (3, 2.5)
    assert status["workers"][0]["attempts"] == 0
    decisions = [dict(asdict(one), trace="") for one in (PLACED, REFUSED)]
    assert [decision.pop("request_id") for decision in decisions] == ["seen", ""]
    assert status["decisions"] == decisions
    assert status["model"]["name"] == "tiny" and status["model"]["mode"] == "disaggregated"


async def test_the_status_says_whether_the_model_can_chat_and_counts_tokens() -> None:
    async with page_door(template="<{{ messages[0].content }}>") as door:
        before = (await door.ask("/api/status")).fields
        await door.ask(COMPLETIONS, {"prompt": "Hello", "max_tokens": 3})
        after = (await door.ask("/api/status")).fields["traffic"]
    assert before["model"]["chat"]
    names = ("prompt_tokens", "generated_tokens", "kv_bytes")  # the fake path has no meshes
    assert [before["traffic"][name] for name in names] == [0, 0, None]
    assert [after[name] for name in names] == [5, 3, None]
    async with page_door(template=None) as door:
        assert not (await door.ask("/api/status")).fields["model"]["chat"]


async def test_the_files_are_open_and_what_they_show_needs_a_token(tmp_path) -> None:
    async with page_door(service=with_tokens(tmp_path, "secret", "other tenant=acme")) as door:
        assert (await door.ask("/")).status == (await door.ask("/web/main.js")).status == 200
        for path in JSON_PATHS:
            assert (await door.ask(path)).status == 401
            assert (await door.ask(path, authorization="Bearer wrong")).status == 401
            for token in ("secret", "other"):
                answer = await door.ask(path, authorization=f"Bearer {token}")
                assert answer.status == 200
                assert answer.headers["cache-control"] == "no-store"


async def test_a_request_whose_client_asks_for_a_trace_has_a_timeline_and_no_other_has() -> None:
    asked = {"prompt": "Hello", "max_tokens": 3}
    async with page_door() as door:
        await door.ask(COMPLETIONS, asked | {"request_id": "unseen"})
        unsampled = TRACEPARENT.removesuffix("01") + "00"
        await door.ask(COMPLETIONS, asked | {"request_id": "not asked"}, traceparent=unsampled)
        assert (await door.ask("/api/timelines")).fields == {"requests": []}
        await door.ask(COMPLETIONS, asked | {"request_id": "seen"}, traceparent=TRACEPARENT)
        (known,) = (await door.ask("/api/timelines")).fields["requests"]
        spans = (await door.ask(f"/api/timelines/{TRACE}")).fields["spans"]
        nothing = (await door.ask("/api/timelines/" + "0" * 32)).fields
        placed, refused = (await door.ask("/api/status")).fields["decisions"]
    assert (placed["trace"], refused["trace"]) == (TRACE, "")
    assert (known["trace"], known["request"], known["result"]) == (TRACE, "seen", "length")
    assert known["prompt_tokens"] == 5
    assert [span["name"] for span in spans] == ["request", "first token"]
    whole, first = spans
    assert first["ended"] is None and whole["started"] <= first["started"] <= whole["ended"]
    assert nothing == {"spans": []}


async def test_a_running_requests_timeline_is_known_so_far() -> None:
    path = ManyWorkers()
    path.gate.clear()
    async with page_door(path) as door:
        reader, writer = await door.connect()
        asked = {"prompt": "x", "max_tokens": 3, "stream": True}
        writer.write(request(COMPLETIONS, asked, traceparent=TRACEPARENT))
        await eventually(lambda: path.made_events == 1)
        await reader.readuntil(b"data: ")
        spans = (await door.ask(f"/api/timelines/{TRACE}")).fields["spans"]
        assert [span["name"] for span in spans] == ["first token"]
        path.gate.set()
        writer.close()


async def test_a_token_of_a_tenant_is_not_told_of_others_requests(tmp_path) -> None:
    async with page_door(service=with_tokens(tmp_path, "all", "one tenant=acme")) as door:
        asked = {"prompt": "x", "max_tokens": 2, "request_id": "seen"}
        await door.ask(COMPLETIONS, asked, traceparent=TRACEPARENT, authorization="Bearer one")
        placed = [
            (await door.ask("/api/status", authorization=f"Bearer {token}")).fields["decisions"][0]
            for token in ("one", "all")
        ]
        told = await door.ask("/api/timelines", authorization="Bearer one")
        by_trace = await door.ask(f"/api/timelines/{TRACE}", authorization="Bearer one")
        everybody = await door.ask("/api/timelines", authorization="Bearer all")
    assert [decision["trace"] for decision in placed] == ["", TRACE]
    assert told.fields == {"requests": []}
    assert len(by_trace.fields["spans"]) == 2
    assert len(everybody.fields["requests"]) == 1
