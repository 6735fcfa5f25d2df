"""Endpoints of OpenAI's Batch API: /v1/files and /v1/batches.

A file is uploaded as multipart/form-data. Its size limit is that of other request bodies."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from jdisagg.errors import InvalidRequestError
from jdisagg.service.batch_folder import Batch, BatchFolder, Owner, StoredFile, new_id
from jdisagg.service.batch_jobs import WINDOW_SECONDS, BatchJobs
from jdisagg.service.batch_lines import ENDPOINTS
from jdisagg.service.http.bodies import BatchFields
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.fields import Fields
from jdisagg.service.http.generation import IGNORED
from jdisagg.service.http.guard import Endpoint, HttpGuard
from jdisagg.service.http.requests import ignored_header

MOST_LISTED, LISTED = 10_000, 20
JSON_LINES = b"application/jsonl"
_TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)
_NAME = re.compile(rb'\bname="([^"]*)"')
_FILENAME = re.compile(rb'filename="([^"]*)"')

_encode = msgspec.json.encode


class Batches:
    def __init__(self, folder: BatchFolder, jobs: BatchJobs, limit_bytes: int) -> None:
        self._folder = folder
        self._jobs = jobs
        self._limit_bytes = limit_bytes

    def endpoints(self, guard: HttpGuard) -> dict[str, Endpoint]:
        return {
            "/v1/files": Endpoint(guard, "GET, POST", self._files),
            "/v1/files/{id}": Endpoint(guard, "GET, DELETE", self._file),
            "/v1/files/{id}/content": Endpoint(guard, "GET", self._content),
            "/v1/batches": Endpoint(guard, "GET, POST", self._batches),
            "/v1/batches/{id}": Endpoint(guard, "GET", self._batch),
            "/v1/batches/{id}/cancel": Endpoint(guard, "POST", self._cancel),
        }

    async def _files(self, exchange: Exchange) -> None:
        if exchange.scope["method"] != "POST":
            files = [one for one in self._folder.files.values() if one.owner.calls]
            purpose = _query(exchange, "purpose")
            shown = [shown_file(one) for one in files if purpose in ("", one.purpose)]
            return await exchange.reply(_page(exchange, shown, MOST_LISTED))
        body = await exchange.body(self._limit_bytes)
        parts = form_parts(exchange.headers.get("content-type", ""), body)
        purpose = parts.get("purpose", ("", b""))[1].decode("utf-8", "replace")
        if purpose != "batch":
            raise InvalidRequestError(
                f"purpose must be batch, got {purpose[:80]!r}; the server keeps files for batches"
            )
        if "file" not in parts:
            raise InvalidRequestError("file is missing: send it as a part of the form")
        name, data = parts["file"]
        file = self._folder.new_file(data, name[:255] or "file.jsonl", purpose)
        await exchange.reply(_encode(shown_file(file)))

    async def _file(self, exchange: Exchange) -> None:
        file = self._folder.file(exchange.scope["path_params"]["id"])
        if exchange.scope["method"] != "DELETE":
            return await exchange.reply(_encode(shown_file(file)))
        used = [one.id for one in self._jobs.running if one.input_file_id == file.id]
        if used:
            raise InvalidRequestError(
                f"file {file.id} is the input of {used[0]}, which has not ended; cancel it first"
            )
        self._folder.delete_file(file)
        await exchange.reply(_encode({"id": file.id, "object": "file", "deleted": True}))

    async def _content(self, exchange: Exchange) -> None:
        file = self._folder.file(exchange.scope["path_params"]["id"])
        content = await asyncio.to_thread(self._folder.content(file.id).read_bytes)
        await exchange.reply(content, content_type=JSON_LINES)

    async def _batches(self, exchange: Exchange) -> None:
        if exchange.scope["method"] != "POST":
            found = [one for one in self._folder.batches.values() if one.owner.calls]
            found.sort(key=lambda one: (one.created_at, one.id), reverse=True)
            return await exchange.reply(_page(exchange, list(map(shown_batch, found)), 100))
        fields = Fields.of(await exchange.body(self._limit_bytes))
        exchange.fields = fields.names
        asked = fields.fill(BatchFields)
        if ignored := ignored_header(fields):
            exchange.reply_headers.append((IGNORED, ignored))
        if asked.endpoint not in ENDPOINTS:
            raise InvalidRequestError(
                f"endpoint must be one of {', '.join(ENDPOINTS)}, got {asked.endpoint[:80]!r}"
            )
        if asked.completion_window != "24h":
            raise InvalidRequestError(
                f"completion_window must be 24h, got {asked.completion_window[:80]!r}"
            )
        file, now = self._folder.file(asked.input_file_id), int(time.time())
        batch = Batch(
            new_id("batch"),
            Owner.current(),
            asked.endpoint,
            file.id,
            "validating",
            0,
            now,
            now + WINDOW_SECONDS,
            metadata={name: str(value) for name, value in asked.metadata.items()}
            if asked.metadata is not None
            else None,
        )
        self._jobs.add(batch)
        await exchange.reply(_encode(shown_batch(batch)))

    async def _batch(self, exchange: Exchange) -> None:
        batch = self._folder.batch(exchange.scope["path_params"]["id"])
        await exchange.reply(_encode(shown_batch(batch)))

    async def _cancel(self, exchange: Exchange) -> None:
        batch = self._folder.batch(exchange.scope["path_params"]["id"])
        self._jobs.cancel(batch)
        await exchange.reply(_encode(shown_batch(batch)))


def shown_file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def shown_batch(batch: Batch) -> dict[str, Any]:
    faults = [
        {"code": one.code, "message": one.message, "line": one.line or None, "param": None}
        for one in batch.faults
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: batch.times.get(name) for name in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    }


def form_parts(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """Splits a form. Returns the file name, or "", and the content of each part by its name. Raises
    InvalidRequestError if the body is not a form."""
    kind, _, rest = content_type.partition(";")
    found = re.search(r'boundary="?([^";]{1,70})"?', rest)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise InvalidRequestError(
            f"content-type must be multipart/form-data with a boundary, got {content_type[:80]!r}"
        )
    mark = b"\r\n--" + found[1].strip().encode("latin-1")
    parts: dict[str, tuple[str, bytes]] = {}
    for part in (b"\r\n" + body).split(mark)[1:-1]:
        head, ended, data = part.partition(b"\r\n\r\n")
        name, filename = _NAME.search(head), _FILENAME.search(head)
        if not ended or name is None:
            raise InvalidRequestError("the form has a part without a name; send name and file")
        shown = filename[1].decode("utf-8", "replace") if filename else ""
        parts[name[1].decode("utf-8", "replace")] = shown, data
    return parts


def _page(exchange: Exchange, found: Sequence[dict[str, Any]], most: int) -> bytes:
    if after := _query(exchange, "after"):
        ids = [one["id"] for one in found]
        if after not in ids:
            raise InvalidRequestError(f"after={after[:80]!r} is not an id of this list")
        found = found[ids.index(after) + 1 :]
    text = _query(exchange, "limit") or str(LISTED if most == 100 else most)
    limit = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= limit <= most:
        raise InvalidRequestError(f"limit must be in [1, {most}], got {text[:80]!r}")
    shown = found[:limit]
    return _encode(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(found) > limit,
        }
    )


def _query(exchange: Exchange, name: str) -> str:
    return parse_qs(exchange.scope["query_string"].decode("latin-1")).get(name, [""])[-1]
