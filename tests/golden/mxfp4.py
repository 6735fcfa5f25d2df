"""Draws experts of four bits, and stores them as gpt-oss publishes them, for
`tests/golden/make.py`."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # pyright: ignore[reportMissingImports]


def restored(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What transformers makes of them."""
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


@torch.no_grad()
def draw_mxfp4(model: torch.nn.Module) -> None:
    """Experts of four bits, drawn as such; beside each what it was restored from."""
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj"):
            if not isinstance(weight := getattr(module, name, None), torch.nn.Parameter):
                continue
            experts, into, out = weight.shape
            blocks = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 125, blocks.shape[:-1], dtype=torch.uint8)
            weight.copy_(restored(blocks, scales))
            weight.kept = {"_blocks": blocks, "_scales": scales}


def kept_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name + end: values
        for name, weight in model.named_parameters()
        for end, values in getattr(weight, "kept", {}).items()
    }


def to_mxfp4(directory: Path, kept: Mapping[str, torch.Tensor]) -> None:
    """Puts these in the place of the experts that they are restored to."""
    path = directory / "model.safetensors"
    tensors = {name: each for name, each in load_file(path).items() if f"{name}_blocks" not in kept}
    save_file(tensors | dict(kept), path, {"format": "pt"})
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(fields, indent=2) + "\n")
