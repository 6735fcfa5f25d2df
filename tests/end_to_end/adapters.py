"""LoRA adapters for tests: random ones in PEFT's format, and checkpoints into which they are
merged, the oracle. Nothing here uses the code that serves adapters."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jdisagg.config import EngineConfig
from jdisagg.request import Adapter
from models.peft_folder import adapter_digest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = DENSE,
    strength: float = 0.5,
    **fields: object,
) -> Path:
    """Writes an adapter of every matrix of the checkpoint `base` whose name ends with one of
    `modules`, except those of next-token layers, which come after the model's own layers.
    `strength`: Size of its change relative to the matrix."""
    rng = np.random.default_rng(seed)
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    tensors: dict[str, np.ndarray] = {}
    for name, matrix in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules or matrix.ndim != 2:
            continue
        if module.startswith("model.layers.") and int(module.split(".")[2]) >= layers:
            continue
        out, into = matrix.shape
        a = rng.standard_normal((rank, into)) / np.sqrt(into)
        b = rng.standard_normal((out, rank)) * strength * np.std(matrix) * np.sqrt(into / rank) / 2
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    assert tensors, "the checkpoint has none of these modules"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "bias": "none",
        "peft_version": "0.18.0",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Copies the checkpoint `base` with W + s B A in place of each adapted W."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    tensors = dict(load_file(base / "model.safetensors"))
    for name, a in factors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = factors[name.replace("lora_A", "lora_B")]
        root = config.get("use_rslora", False)
        scale = config["lora_alpha"] / (a.shape[0] ** 0.5 if root else a.shape[0])
        weight = tensors[module + ".weight"]
        change = scale * (b.astype(np.float64) @ a.astype(np.float64))
        tensors[module + ".weight"] = (weight.astype(np.float64) + change).astype(weight.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_slots(
    engine: EngineConfig, slots: int = 3, rank: int = 8, experts: bool = False
) -> EngineConfig:
    prefill, decode = (
        replace(side, adapters=slots, adapter_rank=rank, adapter_experts=experts)
        for side in (engine.prefill, engine.decode)
    )
    return replace(engine, prefill=prefill, decode=decode)


def named(folder: Path, name: str = "") -> Adapter:
    return Adapter(name or folder.name, str(folder), adapter_digest(folder))
