"""The optional capabilities of a worker. Each capability needs programs in addition to the common
programs, which every request needs. If a worker starts before its programs are compiled, it serves
as soon as the common programs are ready. Until then it works as if the capabilities were off, with
two exceptions: it caches blocks from the start, and requests with images or grammars wait."""

import asyncio
import enum
from collections.abc import Iterable

from jdisagg.errors import UnavailableError


class Capability(enum.Enum):
    """An optional capability, in the order in which the programs are loaded.

    Attributes:
        IMAGES: Prompts may have images. Its programs are loaded first, because requests with images
            wait for them.
        GRAMMARS: Generated tokens may have to follow a grammar. Such requests wait for this
            capability, too.
        APPEND: A decode mesh computes the last, uncached tokens of prompts.
        REUSE: A prefill mesh sends cached blocks that a decode mesh lacks, and continues from
            snapshots of recurrent state.
    """

    IMAGES = "images"
    GRAMMARS = "grammars"
    APPEND = "append"
    REUSE = "reuse"
    TIERS = "tiers"
    DRAFTS = "drafts"


class Capabilities:
    """The optional capabilities of one mesh that are missing, because their programs are not loaded
    yet. At first none is missing."""

    def __init__(self) -> None:
        self._missing: set[Capability] = set()
        self._changed = asyncio.Event()
        self.given_up = False

    def ready(self, capability: Capability) -> bool:
        return not self._missing or capability not in self._missing

    @property
    def missing(self) -> tuple[str, ...]:
        if not self._missing:
            return ()
        return tuple([one.value for one in Capability if one in self._missing])

    def load_later(self, capabilities: Iterable[Capability]) -> None:
        self._missing |= set(capabilities)

    def loaded(self, capability: Capability) -> None:
        self._missing.discard(capability)
        self._wake()

    def give_up(self) -> None:
        self.given_up = bool(self._missing)
        self._wake()

    def possible(self, capability: Capability) -> bool:
        return self.ready(capability) or not self.given_up

    async def wait(self, capability: Capability) -> None:
        """Raises UnavailableError if loading has failed."""
        while not self.ready(capability):
            if self.given_up:
                raise UnavailableError(
                    f"programs for {capability.value} could not be loaded, as the worker's log"
                    " states; restart the worker"
                )
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
