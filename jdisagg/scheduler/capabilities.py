"""The optional capabilities of a worker. Each needs programs beside those that every request needs.
A worker that starts without compiled programs serves as soon as the common ones are there, and
gets its capabilities one after the other while it serves. Until then it works as if they were
off, except that it caches blocks from the start. Pure."""

import enum
from collections.abc import Iterable


class Capability(enum.Enum):
    """An optional capability, in the order in which the programs are loaded.

    Attributes:
        APPEND: A decode mesh computes uncached ends of prompts.
        REUSE: A prefill mesh sends cached blocks that a decode mesh lacks, and continues from
            snapshots of recurrent state.
        TIERS: Blocks and sequences are copied to and from host memory, disk and other workers.
        DRAFTS: Decode steps verify drafts.
    """

    APPEND = "append"
    REUSE = "reuse"
    TIERS = "tiers"
    DRAFTS = "drafts"


class Capabilities:
    """The optional capabilities of one mesh whose programs are not loaded yet. In the beginning
    none is missing."""

    def __init__(self) -> None:
        self._missing: set[Capability] = set()

    def ready(self, capability: Capability) -> bool:
        return capability not in self._missing

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple([one.value for one in Capability if one in self._missing])

    def load_later(self, capabilities: Iterable[Capability]) -> None:
        """Records that the programs of these capabilities are loaded while the worker serves."""
        self._missing |= set(capabilities)

    def loaded(self, capability: Capability) -> None:
        self._missing.discard(capability)
