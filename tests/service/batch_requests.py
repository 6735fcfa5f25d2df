"""Requests of batches, for tests."""

import json
from pathlib import Path
from typing import Any


def line(number: int, url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    """Each prompt is one of its own, so that an answer tells which it belongs to."""
    prompt = f"say {number}"
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "temperature": 0}
    if url == "/v1/completions":
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body | more}


def text_of(count: int) -> str:
    return "".join(json.dumps(line(number)) + "\n" for number in range(count))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]
