"""The folder of a checkpoint, as whoever names it may get it wrong. Needs no JAX: routers read the
tokenizer alone."""

from pathlib import Path

from jdisagg.errors import CheckpointError


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
