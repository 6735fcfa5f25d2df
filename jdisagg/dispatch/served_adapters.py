"""The LoRA adapters that a server offers to clients under names.

When an adapter is loaded by name, its folder is checked and the hash of its content is computed.
Requests carry name, folder and hash. A worker loads the adapter when the first request needs it, so
a worker that restarts, or joins later, needs no list of adapters."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jdisagg.dispatch import caller
from jdisagg.errors import InvalidRequestError, UnauthenticatedError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Adapter

MAX_ADAPTERS = 4096
MAX_TEXT_BYTES = 4096

# Function that checks the folder of an adapter and returns its digest. It blocks the thread, and
# raises InvalidRequestError.
CheckAdapter = Callable[[str], str]


async def _no_statuses() -> tuple[WorkerStatus, ...]:
    return ()


class ServedAdapters:
    """The named adapters of one server."""

    def __init__(
        self,
        check: CheckAdapter | None = None,
        statuses: Callable[[], Awaitable[Sequence[WorkerStatus]]] = _no_statuses,
    ) -> None:
        self._check = check
        self._statuses = statuses
        self._named: dict[str, Adapter] = {}

    @property
    def listed(self) -> tuple[Adapter, ...]:
        return tuple(self._named.values())

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def find(self, name: str, model: str) -> Adapter | None:
        """Returns None for "" and `model`, which mean the model without an adapter. Raises
        InvalidRequestError for an unknown name."""
        if name in self._named:
            return self._named[name]
        if name in ("", model):
            return None
        names = ", ".join(map(repr, (model, *self._named)))
        raise InvalidRequestError(f"model must be one of {names[:1000]}, got {name[:80]!r}")

    async def load(self, name: str, path: str, model: str, replace: bool = False) -> Adapter:
        """Checks the adapter in the folder `path` and offers it under a name.

        Args:
            model: Name of the model, which no adapter may have.
            replace: Whether the name may have an adapter already. Running requests of that adapter
                finish with its earlier content.

        Raises:
            InvalidRequestError: The name is taken, the folder cannot be served, or no worker has
                adapter slots.
            UnauthenticatedError: The caller's token belongs to a tenant.
        """
        refuse_tenants("adapters are loaded")
        for field, text in (("lora_name", name), ("lora_path", path)):
            if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
                raise InvalidRequestError(
                    f"{field} must have 1 to {MAX_TEXT_BYTES} bytes, got {text[:80]!r}"
                )
        statuses = await self._statuses()
        if statuses and not any(status.adapter_slots for status in statuses):
            raise InvalidRequestError(
                f"adapter {name!r}: no worker has adapter slots; start the workers with --adapters"
            )
        if name == model or (name in self._named and not replace):
            raise InvalidRequestError(
                f"lora_name {name!r} is taken; unload it first, or set load_inplace"
            )
        if len(self._named) >= MAX_ADAPTERS:
            raise InvalidRequestError(
                f"adapter {name!r}: {MAX_ADAPTERS} adapters have names, the limit; unload one"
            )
        self._named[name] = adapter = await asyncio.to_thread(self._checked, name, path)
        return adapter

    def unload(self, name: str) -> None:
        """Removes a name. Running requests finish with their adapter. Raises InvalidRequestError
        for an unknown name, and UnauthenticatedError if the caller's token belongs to a tenant."""
        refuse_tenants("adapters are unloaded")
        if self._named.pop(name, None) is None:
            raise InvalidRequestError(f"lora_name {name[:80]!r} is not loaded; see /v1/models")

    def name_all(self, modules: str) -> None:
        """Offers the adapters of `modules` ("name=path,name=path") at the server's start. Blocks
        the calling thread. Raises InvalidRequestError for an adapter that cannot be served."""
        for part in filter(None, (part.strip() for part in modules.split(","))):
            name, equals, path = part.partition("=")
            if not (name and equals and path):
                raise InvalidRequestError(f"lora_modules: {part!r} must have the form name=path")
            self._named[name] = self._checked(name, path)

    def _checked(self, name: str, path: str) -> Adapter:
        if self._check is None:
            raise InvalidRequestError(f"adapter {name!r}: this server loads no adapters")
        return Adapter(name, path, self._check(path))


def refuse_tenants(what: str) -> None:
    """Raises UnauthenticatedError if the caller's token belongs to a tenant."""
    if caller.current().tenant:
        raise UnauthenticatedError(f"{what} by tokens without a tenant only; use another token")
