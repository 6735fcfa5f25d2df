"""Checkpoints with a random next-token layer, made from the small checkpoints of tests/golden."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def with_next_token_layer(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint with a next-token layer under the names of DeepSeek-V3, in the form of
    its last layer."""
    directory = Path(shutil.copytree(source, folder / "drafting"))
    fields = json.loads((directory / "config.json").read_text())
    last, width = fields["num_hidden_layers"] - 1, fields["hidden_size"]
    stored = load_file(directory / "model.safetensors")
    random = np.random.default_rng(7)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + random.standard_normal(shape) * scale).astype(np.float32)

    prefix = f"model.layers.{last}."
    own = {
        name.removeprefix(prefix): normal(
            *tensor.shape, scale=tensor.shape[-1] ** -0.5, mean=float(tensor.ndim == 1)
        )
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }
    own |= {
        "enorm.weight": normal(width, scale=0.1, mean=1.0),
        "hnorm.weight": normal(width, scale=0.1, mean=1.0),
        "eh_proj.weight": normal(width, 2 * width, scale=(2 * width) ** -0.5),
        "shared_head.norm.weight": normal(width, scale=0.1, mean=1.0),
        # Checkpoints also hold copies of embedding and head, which are not read.
        "embed_tokens.weight": stored["model.embed_tokens.weight"],
    }
    added = {f"model.layers.{last + 1}.{name}": tensor for name, tensor in own.items()}
    save_file(stored | added, directory / "model.safetensors")
    fields["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(fields))
    return directory
