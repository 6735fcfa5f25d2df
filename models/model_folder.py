"""Checks a checkpoint's folder without reading weights. This module must not import JAX, because
router processes use it."""

from pathlib import Path

from jdisagg.errors import CheckpointError
from models.generation_config import read_object


def check_model_folder(directory: Path) -> None:
    """Raises CheckpointError if `directory` is not a folder."""
    if directory.is_file():
        raise CheckpointError(
            f"model directory {str(directory)!r} is a file; give the directory that contains it"
        )
    if not directory.is_dir():
        raise CheckpointError(
            f"model directory {str(directory)!r} does not exist; give one with config.json, weights"
            " and tokenizer.json"
        )


def stored_dtype(directory: Path) -> str:
    """Returns the compute type for the dtype in config.json: "bfloat16" for bfloat16 and float16,
    "float32" for other types or if config.json gives no dtype."""
    fields = read_object(directory / "config.json")
    inner = fields.get("text_config")
    stated = [
        each.get(name)
        for each in (fields, inner if isinstance(inner, dict) else {})
        for name in ("dtype", "torch_dtype")
    ]
    found = next((name for name in stated if isinstance(name, str)), "float32")
    return "bfloat16" if found in ("bfloat16", "float16") else "float32"
