"""Sessions over HTTP: where their KV is, bringing it back and dropping it; whose they are."""

from pathlib import Path

from jdisagg.messages.ports import SessionAction
from tests.service.doors import TEMPLATE
from tests.service.http_doors import CHATS, USUAL, Answer, HttpDoor, http_door, with_tokens

SHOWN = {
    "worker": "decode-0",
    "tokens": 48,
    "pages_tokens": 32,
    "host_tokens": 16,
    "disk_tokens": 0,
    "idle_seconds": 1.5,
    "retention_seconds": 298.5,
    "pause_seconds": 20.0,
}


async def call(door: HttpDoor, method: str, path: str, token: str = "") -> Answer:
    key = f"authorization: Bearer {token}\r\n" if token else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{key}"
    return await door.send(f"{head}content-length: 0\r\n\r\n".encode())


async def turn(door: HttpDoor, key: str, token: str = "", **fields: str) -> None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    await door.served(CHATS, USUAL[CHATS] | {"session_id": key} | fields, **headers)


async def test_a_session_is_shown_brought_back_and_dropped() -> None:
    async with http_door(template=TEMPLATE) as door:
        await turn(door, "talk/7")
        path = "/v1/sessions/talk%2F7"
        shown = {"id": "talk/7", "object": "session", "workers": [SHOWN]}
        for method, where in (("GET", path), ("POST", f"{path}/prefetch")):
            answer = await call(door, method, where)
            assert (answer.status, answer.fields) == (200, shown)
        answer = await call(door, "DELETE", path)
        deleted = {"id": "talk/7", "object": "session", "deleted": True, "dropped_tokens": 32}
        assert (answer.status, answer.fields) == (200, deleted)
        assert [one.action for one in door.path.sessions] == [
            SessionAction.SHOW,
            SessionAction.PREFETCH,
            SessionAction.DROP,
        ]


async def test_what_cannot_be_answered_has_its_status() -> None:
    async with http_door(template=TEMPLATE) as door:
        for method, path, status, message in (
            ("GET", "/v1/sessions/unknown", 404, "session 'unknown' is unknown"),
            ("DELETE", "/v1/sessions/unknown", 404, "session 'unknown' is unknown"),
            ("POST", "/v1/sessions/unknown/prefetch", 404, "session 'unknown' is unknown"),
            ("GET", "/v1/sessions", 404, "Not found"),
            ("GET", f"/v1/sessions/{'k' * 257}", 400, "session may hold at most 256 bytes"),
            ("POST", "/v1/sessions/k", 405, "method must be GET, DELETE"),
            ("GET", "/v1/sessions/k/prefetch", 405, "method must be POST"),
            ("DELETE", "/v1/sessions/silent", 503, "did not answer"),
        ):
            answer = await call(door, method, path)
            assert answer.status == status and message in answer.error["message"], answer.body


async def test_a_key_belongs_to_its_tenant_and_salt(tmp_path: Path) -> None:
    tokens = with_tokens(tmp_path, "one tenant=acme", "two tenant=globex", "three")
    async with http_door(template=TEMPLATE, service=tokens) as door:
        path = "/v1/sessions/s"
        await turn(door, "s", "one")
        await turn(door, "t", "one", cache_salt="x")
        for method in ("GET", "DELETE"):
            for token, status in (("one", 200), ("two", 404), ("three", 404), ("", 401)):
                assert (await call(door, method, path, token)).status == status, token
            # the tenant of a token goes before that of the query
            assert (await call(door, method, f"{path}?tenant=acme", "two")).status == 404
        assert (await call(door, "GET", "/v1/sessions/t", "one")).status == 404
        assert (await call(door, "GET", "/v1/sessions/t?cache_salt=x", "one")).status == 200
