"""Configuration of the prefix cache. `jdisagg/config.py` re-exports it as one of its parts."""

import math
from dataclasses import dataclass, replace

from jdisagg.errors import ConfigError


@dataclass(frozen=True)
class PrefixConfig:
    """Prefix cache: KV in device memory, host memory and on disk for requests with a shared prefix.

    docs/prefix_cache.md describes the tiers (device, host, disk) and the cost of each.

    `jdisagg serve` and the other commands replace a field that is None by a default
    (`engine/prefix_defaults.py`). In other programs, None means off.

    Attributes:
        reuse: Whether KV is cached for later requests. None means yes.
        grain_tokens: Block size of the cache, in tokens, the same on all workers.
        grid_tokens: Prefill chunks end, and prefill resumes after a cache hit, at multiples of this
            number of tokens. None uses `grain_tokens`. With the value of `chunk_tokens`, a cache
            hit gives the same bits as a miss in bfloat16. If a value is set, the KV of answers is
            not cached, because decode steps round differently.
        host_gib: Host memory of each worker, in GiB, for blocks evicted from pages. 0 disables it.
            None means a share of the memory that is free when the process starts (0.2, divided
            among the workers of the host). Without `reuse`, it is not used.
        restores: When cached KV is restored from host memory or disk. "priced" restores it only if
            this was measured to be faster than computing or receiving it. "always" always does.
        disk_dir: Folder in which workers of this host store blocks that were used twice. Blocks
            pass through host memory in both directions. Empty disables the disk tier.
        disk_gib: Disk space of each worker in `disk_dir`, in GiB.
        disk_ttl_hours: Age at which blocks on disk expire, in hours. 0 keeps them until the space
            is needed.
        peer_fetch: Whether workers fetch KV from each other, as `routing.peer_fetch` states for the
            router. None means yes with `reuse`, if the cluster has workers to fetch from.
        append_tokens: Largest number of uncached tokens at a prompt's end that a decode worker
            computes itself, if the router estimates this to be faster than a transfer. 0 leaves all
            prompts to prefill workers. None means 256 with `reuse`, if times are predicted.
        events: ZeroMQ address to which each worker publishes its cached blocks for routers of other
            projects, such as tcp://*:5557 (docs/router.md). The workers of a cluster on one host
            use consecutive ports. Events contain the tokens of prompts. Empty disables them.
        events_replay: ZeroMQ address from which a subscriber gets batches that it missed, with the
            same rule for ports. Empty disables it.
        events_topic: Topic of the published batches.

    Raises:
        ConfigError: A field is invalid. The message names the field and its value.
    """

    reuse: bool | None = None
    grain_tokens: int = 128
    grid_tokens: int | None = None
    host_gib: float | None = None
    restores: str = "priced"
    disk_dir: str = ""
    disk_gib: float = 0.0
    disk_ttl_hours: float = 0.0
    peer_fetch: bool | None = None
    append_tokens: int | None = None
    events: str = ""
    events_replay: str = ""
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

    def __post_init__(self) -> None:
        grain, grid = self.grain_tokens, self.grid_tokens
        if grain < 1 or grain % 16:
            raise ConfigError(
                f"prefix.grain_tokens must be a multiple of 16, the smallest block that a"
                f" hand-off sends, got {grain}"
            )
        if grid is not None and (grid < 1 or grid % grain):
            raise ConfigError(
                f"prefix.grid_tokens must be a multiple of prefix.grain_tokens={grain}, got {grid}"
            )
        if self.host_gib is not None and not 0 <= self.host_gib < math.inf:
            raise ConfigError(f"prefix.host_gib must be 0 or more GiB, got {self.host_gib}")
        if self.restores not in ("priced", "always"):
            raise ConfigError(f"prefix.restores must be priced or always, got {self.restores!r}")
        if not 0 <= self.disk_gib < math.inf:
            raise ConfigError(f"prefix.disk_gib must be 0 or more GiB, got {self.disk_gib}")
        if bool(self.disk_dir) != bool(self.disk_gib):
            raise ConfigError(
                f"prefix.disk_dir={self.disk_dir!r} and prefix.disk_gib={self.disk_gib:g} go"
                " together; give --disk_cache_dir and --disk_cache_gib, or neither"
            )
        if not 0 <= self.disk_ttl_hours < math.inf:
            raise ConfigError(
                f"prefix.disk_ttl_hours must be 0 or more, got {self.disk_ttl_hours}; 0 keeps"
                " blocks until the space is needed"
            )
        if self.disk_ttl_hours and not self.disk_gib:
            raise ConfigError(
                f"prefix.disk_ttl_hours={self.disk_ttl_hours:g} needs the disk tier, and"
                " prefix.disk_gib=0 disables it; give --disk_cache_dir and"
                " --disk_cache_gib, or omit the limit"
            )
        if self.disk_gib and self.reuse is False:
            raise ConfigError(
                f"prefix.disk_gib={self.disk_gib:g} needs the prefix cache, and prefix.reuse=False"
                " disables it; remove --noprefix_cache"
            )
        if self.disk_gib and self.host_gib == 0:
            raise ConfigError(
                f"prefix.disk_gib={self.disk_gib:g} needs host memory to stage its blocks, and"
                " prefix.host_gib=0 reserves none; remove --host_cache_gib=0"
            )
        if self.events_replay and not self.events:
            raise ConfigError(
                f"prefix.events_replay={self.events_replay!r} needs prefix.events; set both"
            )
        if self.events and self.reuse is False:
            raise ConfigError(
                f"prefix.events={self.events!r} needs the prefix cache, and prefix.reuse=False"
                " disables it; add --prefix_cache"
            )
        self._check_append()

    def _check_append(self) -> None:
        append = self.appends
        if append < 0 or append % 16:
            raise ConfigError(
                "prefix.append_tokens must be 0 or a multiple of 16, the alignment of rows in a"
                f" chunk, got {append}"
            )
        if append and self.reuse is False:
            raise ConfigError(
                f"prefix.append_tokens={append} needs the prefix cache, and prefix.reuse=False"
                " disables it; remove --noprefix_cache"
            )
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
