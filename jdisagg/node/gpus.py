"""Assigns a host's GPUs to child processes. Each child process receives its GPUs in environment
variables.

GPUs are identified by index or UUID, as in CUDA_VISIBLE_DEVICES. If several workers share a GPU,
each of them uses a part of its memory. This module imports neither JAX nor CUDA."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.layout.platforms import DEVICE_FRACTION as DEVICE_FRACTION

VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION"
_MEMORY_BEFORE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# The variable of a Slurm step is before that of the job, because the latter is set in steps too.
_LOCAL_SIZES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
_UUIDS = ("GPU-", "MIG-")


def parse_gpus(flag: str, text: str, *, several: bool = True) -> tuple[int, ...]:
    """Parses a list of GPU indices: "0-3,6" gives 0, 1, 2, 3, 6. `several`: whether an index may be
    repeated, so that workers share a GPU. Raises ConfigError if the list is invalid."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(
                f"--{flag}={text}: {part!r} is not a GPU; give indices, such as 0-3,6"
            )
        indices = range(int(first), int(last or first) + 1)
        if not indices:
            raise ConfigError(f"--{flag}={text}: {part!r} goes backwards; put the smaller first")
        found += indices
    if not several and len(set(found)) < len(found):
        raise ConfigError(
            f"--{flag}={text} has one GPU twice, and a worker's mesh has different ones; to share"
            " one, give it to each worker, with a --memory_fraction of its own"
        )
    return tuple(found)


def may_use(environment: Mapping[str, str], *platforms: str) -> bool:
    """Returns whether JAX may use one of `platforms`: JAX_PLATFORMS lists one of them, or is not
    set."""
    configured = environment.get("JAX_PLATFORMS", "")
    return not configured or not set(platforms).isdisjoint(configured.split(","))


def gpus_of_host(
    environment: Mapping[str, str], devices: Path = Path("/dev")
) -> tuple[int | str, ...]:
    """Returns an empty tuple if JAX is configured for other platforms."""
    if not may_use(environment, "cuda", "gpu"):
        return ()
    visible = environment.get(VISIBLE)
    if visible is None:
        # CUDA numbers the present GPUs from 0, independent of file names: a container may have
        # only /dev/nvidia4.
        names = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
        return tuple(range(sum(name.isdigit() for name in names)))
    found: list[int | str] = []
    for part in map(str.strip, visible.split(",")):
        if not part.isdigit() and not part.startswith(_UUIDS):
            break  # CUDA ignores entries behind an invalid one
        found.append(int(part) if part.isdigit() else part)
    return tuple(found)


def assign_gpus(
    names: Sequence[str], needs: Sequence[int], gpus: Sequence[int | str]
) -> dict[str, tuple[int | str, ...]]:
    """Assigns GPUs to processes in order: process i gets the next `needs[i]` GPUs. Raises
    ConfigError if there are too few GPUs, or a process would get the same GPU twice."""
    if sum(needs) > len(gpus):
        wanted = ", ".join(f"{name} {need}" for name, need in zip(names, needs, strict=True))
        raise ConfigError(
            f"the workers need {sum(needs)} GPUs ({wanted}) and there are {len(gpus)}"
            f" ({','.join(map(str, gpus)) or 'none'}); start fewer workers, choose smaller layouts,"
            " or let several share one: --gpus=0,0"
        )
    assigned: dict[str, tuple[int | str, ...]] = {}
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
    environment: Mapping[str, str],
    gpus: Sequence[int | str],
    fraction: float,
    all_gpus: Sequence[int | str],
) -> dict[str, str]:
    """Returns `environment` with the GPU variables of one process: visible GPUs, and the fraction
    of GPU memory for XLA.

    Args:
        fraction: Fraction of a GPU's memory for all processes that share the GPU. Each of them gets
            an equal part.
        all_gpus: GPUs of all processes, where a shared GPU occurs more than once.
    """
    shared = max((Counter(all_gpus)[gpu] for gpu in gpus), default=1)
    told = {VISIBLE: ",".join(map(str, gpus)), MEMORY: f"{fraction / max(1, shared):.4f}"}
    # JAX raises if both names of the fraction are set
    kept = {name: value for name, value in environment.items() if name != _MEMORY_BEFORE}
    return {**kept, **told}


def set_memory_fraction(fraction: float) -> None:
    """Sets the fraction of GPU memory that XLA may use in this process. Must be called before the
    first use of a device. Has no effect if the environment already sets a fraction."""
    if _MEMORY_BEFORE not in os.environ:
        os.environ.setdefault(MEMORY, f"{fraction:.4f}")


def local_devices(environment: Mapping[str, str], gpus: int) -> list[int] | None:
    """Returns the indices of the visible GPUs that this task of Slurm or Open MPI uses.

    Each task gets an equal share of the node's GPUs. If the scheduler has bound GPUs to tasks, the
    task gets all GPUs that it can see. This function is needed because jax.distributed.initialize
    gives each task exactly one device by default. Returns the indices, or None if the process runs
    under no scheduler. JAX then uses all GPUs. Raises ConfigError if the number of GPUs is not a
    multiple of the number of tasks, or a variable of the scheduler is not a number."""
    size, tasks = _number(environment, _LOCAL_SIZES)
    _, rank = _number(environment, _LOCAL_RANKS)
    if tasks is None or rank is None or not gpus:
        return None
    _, on_node = _number(environment, (_GPUS_ON_NODE,))
    bound = VISIBLE in environment and gpus < tasks if on_node is None else gpus < on_node
    if bound:
        return list(range(gpus))
    if not tasks or gpus % tasks:
        raise ConfigError(
            f"{size}={environment[size]} tasks on a node of {gpus} GPUs: they cannot share the GPUs"
            " evenly; start one task per node, or one per GPU"
        )
    each = gpus // tasks
    return list(range(rank * each, (rank + 1) * each))


def _number(environment: Mapping[str, str], names: Sequence[str]) -> tuple[str, int | None]:
    name = next((name for name in names if name in environment), "")
    if not name:
        return "", None
    number = environment[name].split("(")[0].split(",")[0]
    if not number.isdigit():
        raise ConfigError(
            f"{name}={environment[name]} is not a number; start the task with srun or mpirun"
        )
    return name, int(number)
