"""Files of batches: what is read, appended, and sent again."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.service import batch_lines
from jdisagg.service.batch_lines import (
    AnswerFile,
    BatchLine,
    BatchReply,
    answer_line,
    checked,
    error_line,
    read_lines,
    send_lines,
)
from tests.service.batch_requests import line, text_of, written


def lines_of(path: Path) -> list[BatchLine]:
    return [one for one in read_lines(path) if isinstance(one, BatchLine)]


def test_the_requests_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(text_of(3) + "\n\n" + json.dumps(line(7, "/v1/completions")) + "\n")
    assert checked(path) == (["r0", "r1", "r2", "r7"], [])
    assert [one.number for one in lines_of(path)] == [1, 2, 3, 6]
    assert [one.url for one in lines_of(path)][-1] == "/v1/completions"


FAULTS: list[tuple[Any, int, str]] = [
    ([line(0), "{"], 2, "must be an object"),
    ([[1]], 1, "must be an object"),
    ([{"custom_id": "a"}], 1, "must be an object"),
    ([line(0) | {"custom_id": ""}], 1, "custom_id must have 1 to 512"),
    ([line(0), line(1), line(0)], 3, "that of line 1 too"),
    ([line(0) | {"method": "GET"}], 1, "method must be POST"),
    ([line(0) | {"url": "/v1/models"}], 1, "url must be one of"),
    ([line(0, stream=True)], 1, "body.stream must be false"),
    ([line(0, "/v1/completions")], 1, "is not the batch's endpoint"),
    ([], 0, "no requests"),
]


@pytest.mark.parametrize(("rows", "number", "words"), FAULTS)
def test_a_faulty_line_is_named(tmp_path: Path, rows: list[Any], number: int, words: str) -> None:
    path = tmp_path / "in"
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts))
    _, (fault,) = checked(path, "/v1/chat/completions")
    assert fault.line == number and words in fault.message


def test_an_answer_that_was_cut_off_is_none(tmp_path: Path) -> None:
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_text(text_of(3))
    first, second, third = lines_of(source)
    with contextlib.closing(AnswerFile(path)) as file:
        file.add(answer_line(first, BatchReply(200, b'{"choices": [\n1]}')))
        file.add(error_line(second, "batch_expired", "late"))
        with pytest.raises(ConfigError, match="being written by another process"):
            AnswerFile(path)
    kept = path.read_bytes()
    path.write_bytes(kept + answer_line(third, BatchReply(200, b"{}"))[:-1])
    with contextlib.closing(AnswerFile(path)) as file:
        assert file.ids == {"r0", "r1"} and path.read_bytes() == kept
        file.add(answer_line(third, BatchReply(502, b"<html>")))
    one, two, three = written(path)
    assert one["response"]["body"] == {"choices": [1]} and one["error"] is None
    assert (two["response"], two["error"]["code"]) == (None, "batch_expired")
    assert (three["response"]["status_code"], three["response"]["body"]) == (502, "<html>")


def test_a_file_of_other_lines_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"prompt": "mine"}\n')
    with pytest.raises(ConfigError, match="line 1 is not an answer"):
        AnswerFile(path)
    assert path.read_text() == '{"prompt": "mine"}\n'


async def test_a_request_is_sent_again_while_a_server_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "FIRST_PAUSE_SECONDS", 0.001)
    path = tmp_path / "in"
    path.write_text(text_of(40))
    asked: dict[str, int] = {}
    running, most = 0, 0

    async def answer(line: BatchLine) -> BatchReply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        count = asked[line.custom_id] = asked.get(line.custom_id, 0) + 1
        passing = {1: BatchReply(0, b""), 2: BatchReply(429, b"", 0.001), 3: BatchReply(503, b"")}
        return passing.get(count, BatchReply(400 if line.number == 5 else 200, b"{}"))

    taken: list[tuple[str, int]] = []
    take = lambda line, reply: taken.append((line.custom_id, reply.status))  # noqa: E731
    await send_lines(lines_of(path), answer, take, at_once=7)
    assert sorted(taken) == sorted((f"r{at}", 400 if at == 4 else 200) for at in range(40))
    assert most == 7 and set(asked.values()) == {4}
    with pytest.raises(UnavailableError, match=r"no request was answered .* status 0: refused"):
        dead = lambda _: asyncio.sleep(0, BatchReply(0, b"refused"))  # noqa: E731
        await send_lines(lines_of(path), dead, take, 2, patience_seconds=0.01)
