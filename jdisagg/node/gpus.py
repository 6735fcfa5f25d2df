"""Which of a host's GPUs a process may use: decided before it is started, told in its environment.

GPUs are named by index, as in CUDA_VISIBLE_DEVICES. Several workers may share one: each then gets
its part of the memory. Knows neither JAX nor CUDA."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdisagg.errors import ConfigError

# Of a GPU's memory, for XLA, where the configuration does not say.
DEVICE_FRACTION = 0.9
VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION"
_MEMORY_BEFORE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_LOCAL_SIZES = ("SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def parse_gpus(flag: str, text: str) -> tuple[int, ...]:
    """ "0-3,6" -> 0, 1, 2, 3, 6; an index may come twice. Raises ConfigError naming the flag."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--{flag}={text}: {part!r} is no GPU; give indices, such as 0-3,6")
        indices = range(int(first), int(last or first) + 1)
        if not indices:
            raise ConfigError(f"--{flag}={text}: {part!r} goes backwards; put the smaller first")
        found += indices
    return tuple(found)


def gpus_of_host(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Those that this process may use, by NVIDIA's device files and CUDA_VISIBLE_DEVICES; none
    where JAX was told to keep to other platforms."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    there = sorted(
        int(path.name.removeprefix("nvidia"))
        for path in devices.glob("nvidia[0-9]*")
        if path.name.removeprefix("nvidia").isdigit()
    )
    visible = environment.get(VISIBLE)
    if visible is None:
        return tuple(there)
    named = [part for part in visible.split(",") if part.strip().isdigit()]
    return tuple(int(part) for part in named)


def assign_gpus(
    names: Sequence[str], needs: Sequence[int], gpus: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Each process gets the next ones of `gpus`, as many as it needs. Raises ConfigError with the
    sum where there are too few."""
    if sum(needs) > len(gpus):
        wanted = ", ".join(f"{name} {need}" for name, need in zip(names, needs, strict=True))
        raise ConfigError(
            f"the workers need {sum(needs)} GPUs ({wanted}) and there are {len(gpus)}"
            f" ({','.join(map(str, gpus)) or 'none'}); start fewer workers, choose smaller layouts,"
            " or let several share one: --gpus=0,0"
        )
    assigned: dict[str, tuple[int, ...]] = {}
    at = 0
    for name, need in zip(names, needs, strict=True):
        assigned[name] = tuple(gpus[at : at + need])
        if len(set(assigned[name])) < need:
            raise ConfigError(
                f"--gpus: {name} would get GPU {assigned[name]}, one of them twice; a mesh has"
                " different ones: order them so that neighbours differ"
            )
        at += need
    return assigned


def gpu_environment(
    gpus: Sequence[int], fraction: float, all_gpus: Sequence[int]
) -> dict[str, str]:
    """The variables of a process with `gpus`: which it sees, and what part of their memory XLA may
    take, `fraction` over all processes that share one of them."""
    shared = max((Counter(all_gpus)[gpu] for gpu in gpus), default=1)
    return {VISIBLE: ",".join(map(str, gpus)), MEMORY: f"{fraction / max(1, shared):.4f}"}


def set_memory_fraction(fraction: float) -> None:
    """For this process, before JAX first uses a device; what the user said in the environment
    holds."""
    if _MEMORY_BEFORE not in os.environ:
        os.environ.setdefault(MEMORY, f"{fraction:.4f}")


def local_devices(environment: Mapping[str, str], gpus: int) -> list[int] | None:
    """Which of a node's `gpus` a task of Slurm or Open MPI takes: its even share, so that one task
    a node has all and one task a GPU has its own. None where no scheduler says (JAX takes all).

    JAX itself gives each task one device whatever their number (jax.distributed.initialize)."""
    size = next((environment[name] for name in _LOCAL_SIZES if name in environment), None)
    rank = next((environment[name] for name in _LOCAL_RANKS if name in environment), None)
    if size is None or rank is None or not gpus:
        return None
    tasks = int(size.split("(")[0].split(",")[0])
    if gpus % tasks:
        raise ConfigError(
            f"{tasks} tasks on a node of {gpus} GPUs: they cannot be shared out evenly; start one"
            " task a node, or one a GPU"
        )
    each = gpus // tasks
    return list(range(int(rank) * each, (int(rank) + 1) * each))
