"""The folder of a checkpoint, as whoever names it may get it wrong. Needs no JAX: routers read the
tokenizer alone."""

from pathlib import Path

from jdisagg.errors import CheckpointError
from models.generation_config import read_object


def check_model_folder(directory: Path) -> None:
    """Raises CheckpointError where it is none."""
    if directory.is_file():
        raise CheckpointError(
            f"model directory {str(directory)!r} is a file; give the directory that it lies in"
        )
    if not directory.is_dir():
        raise CheckpointError(
            f"model directory {str(directory)!r} does not exist; give one with config.json, weights"
            " and tokenizer.json"
        )


def stored_dtype(directory: Path) -> str:
    """The type that its weights were meant to be computed with, of those that we have: "bfloat16"
    also of float16 ones, "float32" where config.json says nothing."""
    fields = read_object(directory / "config.json")
    inner = fields.get("text_config")
    stated = [
        each.get(name)
        for each in (fields, inner if isinstance(inner, dict) else {})
        for name in ("dtype", "torch_dtype")
    ]
    found = next((name for name in stated if isinstance(name, str)), "float32")
    return "bfloat16" if found in ("bfloat16", "float16") else "float32"
