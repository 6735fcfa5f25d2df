"""KV that stays, as one configures it: a part of `jdisagg/config.py`, where it is imported from."""

import math
from dataclasses import dataclass

from jdisagg.errors import ConfigError


@dataclass(frozen=True)
class PrefixConfig:
    """KV that stays in device memory for later requests that begin alike (docs/prefix_reuse.md).

    Args:
        reuse: whether any stays.
        grain_tokens: of the blocks in which beginnings are known, the same on all workers.
        grid_tokens: prefill chunks are cut, and computing goes on behind what is known, at
            multiples of it (None: the grain). With `chunk_tokens` a hit runs the programs of a
            miss on the same rows, and gives the same bits in bfloat16 too; answers are not kept
            then, for decode steps round otherwise.
        host_gib: host memory of each worker, in GiB, for sequences that it sets aside, and with
            `reuse` for blocks that the pages of a prefill worker have no room for; 0: none.
        restores: when KV comes back from there: "priced", where that was measured to be faster than
            computing it, or "always".
        disk_dir: folder on disk of the prefill workers of this host, for blocks that were used
            twice; they go there and come back through host memory. "": none.
        disk_gib: of it, for each prefill worker, in GiB.
        disk_ttl_hours: blocks that were written there longer ago are removed, and not used; 0: they
            stay while there is room.
        peer_fetch: as `routing.peer_fetch`, of workers. None: no; of a cluster: where any gives.
        append_tokens: what a decode worker lacks of a prompt it computes itself, behind what it
            keeps, where that is no more than so many tokens and the router reckons it to be
            cheaper; 0: prefill workers compute all.

    Raises:
        ConfigError: naming the field, its value and the rule.
    """

    reuse: bool = False
    grain_tokens: int = 128
    grid_tokens: int | None = None
    host_gib: float = 0.0
    restores: str = "priced"
    disk_dir: str = ""
    disk_gib: float = 0.0
    disk_ttl_hours: float = 0.0
    peer_fetch: bool | None = None
    append_tokens: int = 0

    @property
    def host_bytes(self) -> int:
        return int(self.host_gib * (1 << 30))

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_gib * (1 << 30))

    def host_tokens(self, page_size: int) -> int:
        """Of a block in host memory, where pages are of so many tokens; 0: there is none."""
        keeps = self.reuse and self.host_bytes
        return math.lcm(self.grain_tokens, page_size) if keeps else 0

    def peer_tokens(self, page_size: int) -> int:
        """Of a block that another worker gives, where pages are of so many tokens; 0: none does."""
        return math.lcm(self.grain_tokens, page_size) if self.reuse and self.peer_fetch else 0

    def __post_init__(self) -> None:
        grain, grid = self.grain_tokens, self.grid_tokens
        if grain < 1 or grain % 16:
            raise ConfigError(
                f"prefix.grain_tokens must be a multiple of 16, the smallest block that a hand-off"
                f" sends, got {grain}"
            )
        if grid is not None and (grid < 1 or grid % grain):
            raise ConfigError(
                f"prefix.grid_tokens must be a multiple of prefix.grain_tokens={grain}, got {grid}"
            )
        if not 0 <= self.host_gib < math.inf:
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
                f"prefix.disk_ttl_hours must be 0 or more, got {self.disk_ttl_hours}; with 0 blocks"
                " stay while there is room"
            )
        if self.disk_ttl_hours and not self.disk_gib:
            raise ConfigError(
                f"prefix.disk_ttl_hours={self.disk_ttl_hours:g} is of what lies on disk, and"
                " prefix.disk_gib=0 keeps nothing there; give --disk_cache_dir and"
                " --disk_cache_gib, or leave it out"
            )
        if self.disk_gib and not self.reuse:
            raise ConfigError(
                f"prefix.disk_gib={self.disk_gib:g} keeps what prefix.reuse=False throws away; say"
                " --prefix_cache, too"
            )
        if self.disk_gib and not self.host_gib:
            raise ConfigError(
                f"prefix.disk_gib={self.disk_gib:g}: blocks go to disk and come back through host"
                " memory, and prefix.host_gib=0 has none; give --host_cache_gib, too"
            )
        self._check_append()

    def _check_append(self) -> None:
        append = self.append_tokens
        if append < 0 or append % 16:
            raise ConfigError(
                "prefix.append_tokens must be a multiple of 16, where rows of a chunk begin, or 0,"
                f" got {append}"
            )
        if append and not self.reuse:
            raise ConfigError(
                f"prefix.append_tokens={append}: a decode worker appends to what it keeps, and"
                " prefix.reuse=False keeps nothing; say --prefix_cache, too"
            )
        if append and self.grid_tokens is not None:
            raise ConfigError(
                f"prefix.append_tokens={append}: prefix.grid_tokens={self.grid_tokens} promises the"
                " bits of one grid of chunks, and a decode worker appends in smaller ones; leave"
                " one of the two out"
            )
