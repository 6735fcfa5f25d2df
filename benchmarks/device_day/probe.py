"""Probes the machine: versions, XLA's description of the GPU, ceilings of copies and products."""

import shutil
import subprocess
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.device_day.day import Day, Figures
from benchmarks.device_day.timing import seconds_of


def run(day: Day) -> None:
    megabytes, side = (16, 512) if day.small else (4096, 8192)
    day.row("versions", versions)
    day.row("nvidia-smi", smi, gpu=True)
    day.row("target config", lambda: target_config(day), gpu=True)
    day.row("memory", lambda: dict(jax.devices()[0].memory_stats() or {}))
    day.row("copy on the device", lambda: copy(megabytes))
    for dtype in ("bfloat16", "float32"):
        day.row(f"product, {dtype}", lambda dtype=dtype: product(side, dtype))
    day.row("from the host and to it", lambda: host_copies(megabytes))
    day.row("pinned host memory", lambda: pinned(megabytes))


def versions() -> Figures:
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,  # pyright: ignore[reportPrivateImportUsage]
        "numpy": np.__version__,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "cudnn": _cudnn(),
    }


def _cudnn() -> int | None:
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def smi() -> Figures:
    if shutil.which("nvidia-smi") is None:
        return {"skipped": "no nvidia-smi"}
    fields = "name,driver_version,memory.total,clocks.max.sm,pcie.link.gen.max,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return {"gpus": subprocess.check_output(command, text=True).splitlines()}


def target_config(day: Day) -> Figures:
    """Saves XLA's target configuration, with which programs can be compiled for this GPU on other
    machines (benchmarks/gpu_devices.py)."""
    from jaxlib import xla_client

    config = str(xla_client.get_topology_for_devices(jax.devices()).target_config)
    path = day.out / "target_config.txt"
    path.write_text(config)
    return {"file": path.name, "characters": len(config)}


def copy(megabytes: int) -> Figures:
    array = jnp.ones((megabytes << 19,), jnp.bfloat16)
    add = jax.jit(lambda x: x + jnp.bfloat16(1))
    return {"GB/s": 2 * array.nbytes / seconds_of(lambda: add(array)) / 1e9}


def product(side: int, dtype: str) -> Figures:
    left = jax.random.normal(jax.random.key(0), (side, side), jnp.float32).astype(dtype)
    multiply = jax.jit(jnp.dot)
    return {"TFLOP/s": 2 * side**3 / seconds_of(lambda: multiply(left, left)) / 1e12}


def host_copies(megabytes: int) -> Figures:
    host = np.ones((megabytes << 20,), np.uint8)
    up = seconds_of(lambda: jax.device_put(host, jax.devices()[0]), calls=1)
    arrays = [jax.device_put(host, jax.devices()[0]) for _ in range(6)]
    down = seconds_of(lambda: np.asarray(arrays.pop()), calls=1, rounds=4)
    return {"up GB/s": host.nbytes / up / 1e9, "down GB/s": host.nbytes / down / 1e9}


def pinned(megabytes: int) -> Figures:
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        return {"skipped": f"no pinned_host among {kinds}"}
    here = jax.block_until_ready(jnp.ones((megabytes << 20,), jnp.uint8))
    to_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    there = jax.block_until_ready(jax.device_put(here, to_host))
    to_device = SingleDeviceSharding(device, memory_kind=here.sharding.memory_kind)
    moves: dict[str, Callable[[], object]] = {
        "down GB/s": lambda: jax.device_put(here, to_host),
        "up GB/s": lambda: jax.device_put(there, to_device),
    }
    return {name: here.nbytes / seconds_of(move) / 1e9 for name, move in moves.items()}
