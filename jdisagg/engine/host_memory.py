"""Reads how much memory this machine has, within the limit of its container (cgroup)."""

import os
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_memory() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _of_container("memory.max")
    return whole if limit is None else min(whole, limit)


def free_host_memory() -> int:
    """Returns the number of bytes of memory that programs can still allocate on this machine, or
    within the limit of the container if that is less. Returns 0 if it is unknown."""
    try:
        lines = _MEMORY.read_text().splitlines()
        (free,) = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return 0
    limit, used = _of_container("memory.max"), _of_container("memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _of_container(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None
