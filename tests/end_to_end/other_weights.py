"""Checkpoints with other weights of the same model, for tests of updates in place. Nothing here
uses the code that serves or replaces weights."""

import hashlib
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  # numpy's bfloat16
import numpy as np
from safetensors.numpy import load_file, save_file


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
