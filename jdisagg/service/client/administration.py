"""Administration of a server over its HTTP API: weights, sleep, LoRA adapters, prefix caches.

    admin = Administration("localhost:8000", token="...")
    admin.update_weights("/checkpoints/100", version="100")

Calls block. With asyncio, use `asyncio.to_thread`. A bearer token that belongs to a tenant may not
administer. The paths are those of vLLM and SGLang (docs/http.md)."""

import http.client
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from jdisagg.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from jdisagg.messages.weights import SLEEP_SECONDS, UPDATE_SECONDS, WeightsReport
from jdisagg.service.internal.connection import NO_CREDENTIALS, Credentials

T = TypeVar("T")
_ERRORS: dict[int, type[JdisaggError]] = {
    **dict.fromkeys((400, 404, 405, 413, 415), InvalidRequestError),
    401: UnauthenticatedError,
    429: OverloadedError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


class _Failure(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Failure


class _Sleeping(msgspec.Struct):
    workers: dict[str, bool]


class _Dropped(msgspec.Struct):
    blocks: int


class Administration:
    """Calls that change a running server or cluster.

    Args:
        target: URL or host:port of the HTTP API.
        token: Bearer token. Replaces the token of `credentials`.
        timeout_seconds: Time limit of a call, in addition to its `deadline_seconds`.

    Raises:
        ConfigError: `target` is no address of an HTTP API.
    """

    def __init__(
        self,
        target: str = "localhost:8000",
        *,
        token: str = "",
        credentials: Credentials = NO_CREDENTIALS,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._credentials = replace(credentials, token=token) if token else credentials
        scheme = "https" if credentials.tls else "http"
        try:
            url = urlsplit(target if "://" in target else f"{scheme}://{target}")
            if url.scheme not in ("http", "https") or not url.hostname or url.port == 0:
                raise ValueError("no URL of a server")
        except ValueError:  # also for a port above 65535
            raise ConfigError(
                f"target must be the URL or host:port of an HTTP API, got {target!r}; give one such"
                " as localhost:8000 (--http_port of the server)"
            ) from None
        self._url, self._timeout_seconds = url, timeout_seconds

    def update_weights(
        self,
        folder: str,
        *,
        version: str = "",
        mode: str = "recompute",
        deadline_seconds: float = UPDATE_SECONDS,
    ) -> WeightsReport:
        """Replaces the weights of all workers by another checkpoint of the same model.

        Args:
            folder: Folder of a checkpoint on the hosts of all workers, with the served model's
                config.json. Or the name of an offer (`jdisagg.weights.offer`).
            version: Text that identifies the weights in replies. Empty uses a part of their hash.
            mode: What happens to running requests. "recompute": they keep their tokens, and their
                KV is recomputed. "drain": the update waits until they have finished with the old
                weights. "keep": they keep their KV.
            deadline_seconds: Time limit for reading the weights, and for the drain.

        Raises:
            InvalidRequestError: The mode is unknown, or a worker cannot serve the new weights. In
                either case, all workers keep the old weights.
            UnauthenticatedError: The token belongs to a tenant.
        """
        body = {
            "model_path": folder,
            "weight_version": version,
            "mode": mode,
            "deadline_seconds": deadline_seconds,
        }
        path, seconds = "/update_weights_from_disk", 2 * deadline_seconds
        told = self._post(path, body, dict[str, Any], seconds)
        del told["success"]
        workers, failed = tuple(told.pop("workers")), tuple(told.pop("failed"))
        return WeightsReport(workers=workers, failed=failed, **told)

    def sleep(
        self,
        level: int = 1,
        workers: Sequence[str] = (),
        *,
        deadline_seconds: float = SLEEP_SECONDS,
    ) -> Mapping[str, bool]:
        """Frees the KV pages and the weights in device memory. The workers accept no requests until
        `wake`.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them, and `wake` reads them again.
            workers: Names of the workers. Empty means all workers.
            deadline_seconds: Time limit for running sequences to finish.

        Returns:
            Whether each worker of the server sleeps.

        Raises:
            InvalidRequestError: A worker is unknown.
            UnavailableError: A worker cannot sleep now.
        """
        body = {"level": level, "workers": workers, "deadline_seconds": deadline_seconds}
        return self._post("/sleep", body, _Sleeping, deadline_seconds).workers

    def wake(
        self, workers: Sequence[str] = (), *, deadline_seconds: float = UPDATE_SECONDS
    ) -> Mapping[str, bool]:
        """Ends the sleep of workers. The arguments, the result and the errors are those of
        `sleep`."""
        body = {"workers": workers, "deadline_seconds": deadline_seconds}
        return self._post("/wake_up", body, _Sleeping, deadline_seconds).workers

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Offers a LoRA adapter under a name, which requests then give as `model`.

        Args:
            path: Folder in PEFT's format, on the hosts of the server and of all workers.
            replace: Whether an existing adapter of this name is replaced. If False, a name in use
                is an error.

        Raises:
            InvalidRequestError: The adapter cannot be served, or the name is taken.
            UnauthenticatedError: The token belongs to a tenant.
        """
        body = {"lora_name": name, "lora_path": path, "load_inplace": replace}
        self._post("/v1/load_lora_adapter", body, dict[str, object])

    def unload_adapter(self, name: str) -> None:
        """Stops offering an adapter. Running requests keep using the adapter until they finish.

        Raises:
            InvalidRequestError: The name is unknown.
        """
        self._post("/v1/unload_lora_adapter", {"lora_name": name}, dict[str, object])

    def reset_cache(self) -> int:
        """Clears the prefix caches of all workers and returns the number of dropped blocks.

        Raises:
            UnauthenticatedError: The token belongs to a tenant, and tenants share prefix caches.
            UnavailableError: A worker did not answer. Its prefix cache may still hold blocks.
        """
        return self._post("/reset_prefix_cache", {}, _Dropped).blocks

    def _post(
        self, path: str, body: Mapping[str, object], reply: type[T], seconds: float = 0.0
    ) -> T:
        headers = {"content-type": "application/json", **dict(self._credentials.metadata())}
        connection = self._connection(max(0.0, seconds) + self._timeout_seconds)
        try:
            connection.request("POST", path, msgspec.json.encode(body), headers)
            response = connection.getresponse()
            data = response.read()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{path} of {self._url.netloc} did not answer in time; give deadline_seconds"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"no HTTP API answered at {self._url.netloc} ({error}); give the address of"
                " --http_port, and with TLS the CA certificate (--authority)"
            ) from None
        finally:
            connection.close()
        try:
            if response.status == 200:
                return msgspec.json.decode(data, type=reply)
            said = msgspec.json.decode(data, type=_Refusal).error.message
        except msgspec.MsgspecError:
            said = f"{path} of {self._url.netloc} answered {response.status}: {data[:200]!r}"
        raise _ERRORS.get(response.status, JdisaggError)(said)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=seconds)
        return _Tls(host, port, seconds, self._credentials)


class _Tls(http.client.HTTPSConnection):
    def __init__(
        self, host: str, port: int | None, seconds: float, credentials: Credentials
    ) -> None:
        # Bundles of authorities have comments in any language, which ssl does not take.
        authority = credentials.authority.decode("ascii", "ignore")
        context = ssl.create_default_context(cadata=authority or None)
        if credentials.certificate:
            with tempfile.NamedTemporaryFile() as file:  # ssl reads certificates from files only
                file.write(credentials.certificate + b"\n" + credentials.key)
                file.flush()
                context.load_cert_chain(file.name)
        super().__init__(host, port, timeout=seconds, context=context)
        self._secured, self._name = context, credentials.server_name or host

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._secured.wrap_socket(self.sock, server_hostname=self._name)
