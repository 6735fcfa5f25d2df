"""The guide's server: its page and the files that it names, answers over HTTP, and refusals that
name the field."""

import http.client
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.guide.answer import GUIDE_INSTANCES, GuideQuestion, parse_question
from jdisagg.guide.facts import GUIDE_HARDWARE, GUIDE_LINKS, GUIDE_MODELS
from jdisagg.guide.server import QUESTION_BYTES, GuideServer, web_files
from tests import time_scale
from tests.guide.guide_server import guide_server

ROOT = Path(__file__).resolve().parents[2]
WEB = files("jdisagg.guide") / "web"
OWN = {file.name: file.read_text() for file in WEB.iterdir()}
INDEX = OWN["index.html"]


def ask(server: GuideServer, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    limit = time_scale.seconds(60)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=limit)
    connection.request("GET" if body is None else "POST", path, body)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, content


def test_the_page_and_all_files_that_it_names_are_served_and_no_others_exist() -> None:
    with guide_server() as server:
        assert ask(server, "/") == (200, INDEX.encode())
        named = set(re.findall(r'(?:src|href)="web/([^"]+)"', INDEX))
        todo = [*named]
        while todo:
            status, content = ask(server, f"/web/{todo.pop()}")
            assert status == 200
            imported = set(re.findall(r'from "\./([^"]+)"', content.decode()))
            todo += imported - named
            named |= imported
        assert named | {"index.html"} == set(web_files())
        for path in ("/web/", "/web/nothing.js", "/web/../server.py", "/api/guide"):
            assert ask(server, path)[0] == 404
        with pytest.raises(ConfigError, match=f"127.0.0.1:{server.server_port}.*--http_port"):
            GuideServer(server.server_port)


def test_questions_are_answered_over_http_and_refused_by_name() -> None:
    with guide_server() as server:
        status, content = ask(server, "/api/guide", b'{"rate": 0.5, "prompt_tokens": 256}')
        assert status == 200
        assert [way["mode"] for way in json.loads(content)["ways"]][0] == "unified"
        assert ask(server, "/api/guide", b'{"prompt_tokens": 256, "rate": 0.50}') == (200, content)
        status, content = ask(server, "/api/guide/facts", b'{"model": "deepseek-v3"}')
        assert json.loads(content)["kv_bytes_per_token"] == 61 * (512 + 64) * 2
        for path, body, field in (
            ("/api/guide/facts", b'{"model": "gpt-7"}', "model"),
            ("/api/guide", b'{"rate": 1e9}', "rate"),
            ("/api/guide", b"", "bytes"),
            ("/api/guide", b" " * (QUESTION_BYTES + 1), "bytes"),
        ):
            status, content = ask(server, path, body)
            assert status == 400 and field in json.loads(content)["error"]["message"]
        assert ask(server, "/api/other", b"{}")[0] == 404


def test_the_command_says_where_the_guide_is() -> None:
    command = [sys.executable, "-m", "launch.guide", "--http_port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        process.terminate()
    assert re.fullmatch(r"the guide is at http://127\.0\.0\.1:\d+/\n", said)


def test_the_page_offers_the_guides_own_choices() -> None:
    choices = {
        name: tuple(re.findall(r'<option value="([^"]+)"', body))
        for name, body in re.findall(r'<select id="guide-(\w+)">(.*?)</select>', INDEX, re.DOTALL)
    }
    assert choices == {
        "model": tuple(GUIDE_MODELS),
        "hardware": GUIDE_HARDWARE,
        "instances": tuple(str(number) for number in GUIDE_INSTANCES),
        "link": GUIDE_LINKS,
    }


def test_every_value_of_the_pages_sliders_can_be_asked_for() -> None:
    sliders = re.findall(r'"(\w+_\w+|rate)",\s*\[([\d., ]+)\]', OWN["guide.js"])
    assert len(sliders) == 6
    for name, values in sliders:
        for value in values.split(","):
            question = parse_question(f'{{"{name}": {value}}}'.encode(), GuideQuestion)
            assert getattr(question, name) == float(value)
