"""Serves the guide's web page, and the answers to its questions, on loopback.

Each request has a thread. One simulation runs at a time: it keeps a core busy for seconds, and a
page asks its next question after the answer to the last."""

import functools
import importlib.resources
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.guide.answer import GuideQuestion, answer, parse_question
from jdisagg.guide.facts import FactsQuestion, facts

LOOPBACK = "127.0.0.1"
QUESTION_BYTES = 1 << 12
CACHED_ANSWERS = 64
INDEX = "index.html"
SHARED = ("dom.js", "style.css")  # files of the servers' web page
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class GuideServer(ThreadingHTTPServer):
    """Listens on loopback. `port`: 0 lets the system choose one. Raises ConfigError if the port is
    taken."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {LOOPBACK}:{port}: {error}; choose another --http_port"
            ) from None
        self._simulating = threading.Lock()
        self._simulated = functools.lru_cache(CACHED_ANSWERS)(_simulated)

    def simulated(self, body: bytes) -> bytes:
        question = parse_question(body, GuideQuestion)
        with self._simulating:
            return self._simulated(question)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: GuideServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds that an idle connection is kept

    def do_GET(self) -> None:
        name = INDEX if self.path == "/" else self.path.removeprefix("/web/")
        body = web_files().get(name)
        if body is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"{self.path[:80]!r} is no file; the guide is at /")
        else:
            self._reply(HTTPStatus.OK, body, TYPES[name[name.rindex(".") :]])

    def do_POST(self) -> None:
        answers = {"/api/guide": self.server.simulated, "/api/guide/facts": _facts}
        body = self._body()
        if self.path not in answers:
            self._refuse(HTTPStatus.NOT_FOUND, f"{self.path[:80]!r} answers no questions")
        elif body is None:
            self.close_connection = True
            self._refuse(
                HTTPStatus.BAD_REQUEST, f"a question must have 1 to {QUESTION_BYTES} bytes"
            )
        else:
            try:
                self._reply(HTTPStatus.OK, answers[self.path](body), "application/json")
            except JdisaggError as error:
                self._refuse(HTTPStatus.BAD_REQUEST, error.message)

    def log_message(self, format: str, *args: object) -> None: ...

    def _body(self) -> bytes | None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or not 0 < int(length) <= QUESTION_BYTES:
            return None
        return self.rfile.read(int(length))

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"error": {"message": message}}).encode()
        self._reply(status, body, "application/json")

    def _reply(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", f"{kind}; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _simulated(question: GuideQuestion) -> bytes:
    return msgspec.json.encode(answer(question))


def _facts(body: bytes) -> bytes:
    return msgspec.json.encode(facts(parse_question(body, FactsQuestion)))


@functools.cache
def web_files() -> dict[str, bytes]:
    own = importlib.resources.files("jdisagg.guide") / "web"
    servers = importlib.resources.files("jdisagg.service.http") / "web"
    files = [file for file in own.iterdir() if file.name.endswith(tuple(TYPES))]
    files += [servers / name for name in SHARED]
    return {file.name: file.read_bytes() for file in files}
