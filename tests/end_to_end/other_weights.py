"""Checkpoints with other weights of the same model, for tests of updates in place. Nothing here
uses the code that serves or replaces weights."""

import gc
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  # numpy's bfloat16
import numpy as np
from safetensors.numpy import load_file, save_file

from jdisagg.config import EngineConfig, PrefixConfig
from tests.end_to_end.clusters import Running, running
from tests.fakes.cluster import Collected


def perturbed(folder: Path, base: Path, seed: int, strength: float = 0.3) -> Path:
    """Copies the checkpoint `base` with noise on every tensor.

    Args:
        strength: Size of the noise relative to the tensor.
    """
    rng = np.random.default_rng(seed)
    shutil.copytree(base, folder)
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        values = tensor.astype(np.float64)
        noise = rng.standard_normal(tensor.shape) * strength * (np.std(values) or 1e-2)
        tensors[name] = (values + noise).astype(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_sums(folder: Path) -> Path:
    """Writes SHA256SUMS as sha256sum does."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.glob("*.safetensors"))
    ]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    return folder


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


WORDS = (
    "once upon a time there was a little dog who lived in the forest and it liked to play with a"
    " red ball under the big tree"
)


TOKENS = 10


PAGES = PrefixConfig(reuse=True, grain_tokens=16, append_tokens=0, host_gib=0)


async def ask(run: Running, name: str, prompt: str = WORDS, **sampling: object) -> Collected:
    options: dict[str, object] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
    return await run.complete(run.request(prompt, name, **(options | sampling)))


async def cold(engine: EngineConfig, directory: Path) -> Collected:
    """The answer of a cluster that started with these weights."""
    engine = replace(engine, model=replace(engine.model, directory=str(directory)))
    async with running(engine) as run:
        return await ask(run, "cold")


async def versions(run: Running) -> set[str]:
    return {status.weights for status in await run.cluster.status()}


def device_bytes(run: Running) -> int:
    """Bytes of the arrays on the cluster's devices. Arrays may share buffers."""
    gc.collect()
    meshes = {
        device
        for replica in run.cluster.replicas
        for mesh in replica.loaded.meshes
        for device in mesh.devices.flat
    }
    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device in meshes
    }
    return sum(buffers.values())
