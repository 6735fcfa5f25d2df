"""Names of models: folders, and Hugging Face names from the cache or from a hub. The hub is a real
server on loopback that speaks the part of the hub's HTTP API that `huggingface_hub` uses; each
environment has a process of its own, since the library reads its environment at import."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from models.hub import served_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL: dict[str, object] = {"name": "org/small"}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.safetensors": b"twice",
}


class Hub(BaseHTTPRequestHandler):
    """One repository, org/small; `asked` keeps what was requested, with the token."""

    asked: list[tuple[str, str | None]] = []

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("authorization")))
        path = self.path.partition("?")[0]
        if "/org/gated" in path:
            return self._answer(403, b"", {"x-error-code": "GatedRepo"})
        if "/org/small" not in path:
            return self._answer(404, b"", {"x-error-code": "RepoNotFound"})
        if path.startswith("/api/models/"):
            if "/revision/" in path and path.rpartition("/")[2] not in ("main", "v1", COMMIT):
                return self._answer(404, b"", {"x-error-code": "RevisionNotFound"})
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                    for name, data in FILES.items()
                ]
                return self._answer(200, json.dumps(tree).encode(), _JSON)
            siblings = [{"rfilename": name} for name in FILES]
            found = {"id": "org/small", "sha": COMMIT, "siblings": siblings}
            return self._answer(200, json.dumps(found).encode(), _JSON)
        name = path.split(f"/resolve/{COMMIT}/")[-1]
        data = FILES[name]
        headers = {"etag": f'"{_digest(data)}"', "x-repo-commit": COMMIT}
        return self._answer(200, data, headers)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


_JSON = {"content-type": "application/json"}


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ASK = """
import json, sys
from jdisagg.errors import CheckpointError
from models.hub import local_model
for arguments in json.loads(sys.argv[1]):
    try: print(json.dumps(str(local_model(**arguments))))
    except CheckpointError as error: print(json.dumps(f"error: {error}"))
"""


def resolved(home: Path, endpoint: str, *asked: dict[str, object], **more: str) -> list[str]:
    """What each call of `local_model` gives in a process with that environment: its path or its
    error."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(asked)],
        env={**clean, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **more},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return [json.loads(line) for line in done.stdout.splitlines()[-len(asked) :]]


def test_a_name_is_downloaded_once_without_what_is_not_read_and_then_found_offline(
    hub: str, tmp_path: Path
) -> None:
    revised = {**SMALL, "revision": "v1"}
    *first, again = resolved(tmp_path, hub, SMALL, revised, HF_TOKEN="hf_secret")
    folder = Path(again)
    assert first == [again] and any("/revision/v1" in path for path, _ in Hub.asked)
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert found == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    tokens = {token for path, token in Hub.asked if "/org/small" in path}
    assert tokens == {"Bearer hf_secret"}
    Hub.asked = []
    again = resolved(tmp_path, hub, SMALL, HF_HUB_OFFLINE="1")
    assert again == first and not [path for path, _ in Hub.asked if "/org/small" in path]
    assert resolved(tmp_path, "http://127.0.0.1:9", SMALL) == first


def test_a_planner_downloads_no_weights_and_an_unknown_revision_is_refused(
    hub: str, tmp_path: Path
) -> None:
    asked = ({**SMALL, "weights": False}, {**SMALL, "revision": "v9"})
    planned, unknown = resolved(tmp_path, hub, *asked)
    found = {each.name for each in Path(planned).iterdir()}
    assert "config.json" in found and "model.safetensors" not in found
    assert unknown == "error: model 'org/small' has no revision 'v9'"


def test_errors_name_the_model_the_cause_and_the_remedy(hub: str, tmp_path: Path) -> None:
    missing, gated = resolved(tmp_path, hub, {"name": "org/other"}, {"name": "org/gated"})
    assert "'org/other'" in missing and "check the name" in missing
    assert "accept its licence" in gated
    for endpoint, more in ((hub, {"HF_HUB_OFFLINE": "1"}), ("http://127.0.0.1:9", {})):
        (error,) = resolved(tmp_path / "empty", endpoint, SMALL, **more)
        assert "hf download org/small --local-dir DIR" in error and str(tmp_path) in error


def test_a_folder_wins_over_a_name_and_takes_no_revision(hub: str, tmp_path: Path) -> None:
    here: dict[str, object] = {"name": str(tmp_path)}
    asked = (here, {"name": "no-such-folder"}, {**here, "revision": "v1"})
    folder, missing, revised = resolved(tmp_path, hub, *asked)
    assert (folder, missing) == (str(tmp_path), "no-such-folder") and "org/name" in revised
    assert not Hub.asked


def test_a_model_in_the_cache_is_served_under_its_own_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--small" / "snapshots" / COMMIT
    assert served_name(str(snapshot)) == "org/small"
    assert served_name(str(tmp_path / "qwen3")) == "qwen3"
