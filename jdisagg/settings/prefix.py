"""Configuration of the prefix cache. `jdisagg/config.py` re-exports it as one of its parts."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from msgspec import Meta

from jdisagg.errors import ConfigError
from jdisagg.settings.declared import Count, Flag, Needs, NotNegative, OneOf, Settings

_GRAIN = "the smallest block of a hand-off has 16 tokens"
_ROW = "rows of a chunk are aligned to 16 tokens"
_Rows = Annotated[int, Meta(ge=0, multiple_of=16, description=_ROW)]


@dataclass(frozen=True)
class PrefixConfig(Settings):
    """Prefix cache: KV in device memory, host memory and on disk for requests with a shared prefix.

    docs/prefix_cache.md describes the tiers (device, host, disk) and the cost of each.

    `jdisagg serve` and the other commands replace a field that is None by a default
    (`engine/prefix_defaults.py`). In other programs, None means off.

    Attributes:
        reuse: Whether the KV of earlier requests is cached and reused for a shared prefix. None
            means yes.
        grain_tokens: Block size of the cache, in tokens, the same on all workers.
        grid_tokens: Prefill chunks end, and prefill resumes after a hit, at multiples of this
            number. With `chunk_tokens`, a hit gives the same bits as a miss in bfloat16. The KV of
            answers is then not cached, because decode steps round differently. None:
            `grain_tokens`.
        host_gib: Host memory per worker, in GiB, for evicted prefixes. 0: none. Default: 0.2 of the
            free memory, divided among the workers of the host. Without `reuse`, it is not used.
        restores: When cached KV is restored from host memory or disk: priced (if measured to be
            faster than computing or receiving it) or always.
        disk_dir: Folder in which workers of this host store blocks that were used twice, by way of
            host memory. It survives restarts. Empty disables the disk tier.
        disk_gib: Size limit of the disk tier per worker, in GiB.
        disk_ttl_hours: Age in hours at which blocks on disk are removed. 0 keeps them until the
            space is needed.
        peer_fetch: Whether workers that compute prompts fetch cached KV from other workers.
            Default: yes with `reuse`, if the cluster has workers to fetch from.
        append_tokens: Uncached tokens at a prompt's end that a decode worker may compute itself, if
            the router finds it faster than a transfer. 0: none. Default: 256 with `reuse`, if times
            are predicted.
        events: ZeroMQ address to which each worker publishes its cached blocks, with the tokens of
            prompts, such as tcp://*:5557 (docs/router.md). Workers of one host use consecutive
            ports. Empty: none.
        events_replay: ZeroMQ address from which a subscriber gets batches that it missed, with the
            same rule for ports. Empty disables it.
        events_topic: Topic of the published batches.
    """

    section: ClassVar[str] = "prefix"
    reuse: Annotated[bool | None, Flag("prefix_cache")] = None
    grain_tokens: Annotated[int, Meta(gt=0, multiple_of=16, description=_GRAIN)] = 128
    grid_tokens: Count | None = None
    host_gib: Annotated[NotNegative | None, Flag("host_cache_gib")] = None
    restores: Annotated[str, OneOf(("priced", "always"))] = "priced"
    disk_dir: Annotated[str, Flag("disk_cache_dir"), Needs(("disk_gib",))] = ""
    disk_gib: Annotated[
        NotNegative, Flag("disk_cache_gib"), Needs(("disk_dir", "reuse", "host_gib"))
    ] = 0.0
    disk_ttl_hours: Annotated[NotNegative, Flag("disk_cache_ttl_hours"), Needs(("disk_gib",))] = 0.0
    peer_fetch: Annotated[bool | None, Flag()] = None
    append_tokens: Annotated[_Rows | None, Flag(), Needs(("reuse",))] = None
    events: Annotated[str, Needs(("reuse",))] = ""
    events_replay: Annotated[str, Needs(("events",))] = ""
    events_topic: str = ""

    def of_worker(self, index: int) -> "PrefixConfig":
        if not self.events:
            return self
        events, replay = _port_after(self.events, index), _port_after(self.events_replay, index)
        return replace(self, events=events, events_replay=replay)

    @property
    def host_bytes(self) -> int:
        return int((self.host_gib or 0.0) * (1 << 30)) if self.reuse else 0

    @property
    def appends(self) -> int:
        return self.append_tokens or 0

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_gib * (1 << 30))

    def start_tokens(self, page_size: int) -> int:
        """Returns the number of tokens of which prefill may resume at each multiple, after a cache
        hit."""
        return math.lcm(self.grain_tokens, page_size, self.grid_tokens or self.grain_tokens)

    def host_tokens(self, page_size: int) -> int:
        """Returns the block size of the host tier in tokens, or 0 if there is no host tier."""
        return math.lcm(self.grain_tokens, page_size) if self.host_bytes else 0

    def peer_tokens(self, page_size: int) -> int:
        """Returns the size in tokens of a block that is fetched from another worker, or 0 if
        workers do not fetch from each other."""
        return math.lcm(self.grain_tokens, page_size) if self.reuse and self.peer_fetch else 0

    def _check(self) -> None:
        grain, grid = self.grain_tokens, self.grid_tokens
        if grid is not None and grid % grain:
            raise ConfigError(
                f"prefix.grid_tokens must be a multiple of prefix.grain_tokens={grain}, got {grid}"
            )
        append = self.appends
        if append and self.grid_tokens is not None:
            raise ConfigError(
                f"prefix.append_tokens={append} contradicts prefix.grid_tokens={self.grid_tokens}:"
                " a decode worker appends in chunks smaller than the grid; omit one of the two"
            )


NO_PREFIX = PrefixConfig(reuse=False)


def _port_after(address: str, index: int) -> str:
    host, _, port = address.rpartition(":")
    if address.startswith("tcp:") and port.isdecimal() and int(port):
        return f"{host}:{int(port) + index}"
    return f"{address}.{index}" if index and address.startswith(("ipc:", "inproc:")) else address
