"""Checks a checkpoint's folder without reading weights. This module must not import JAX, because
router processes use it."""

from pathlib import Path

from jdisagg.errors import CheckpointError
from models.generation_config import read_object


def check_model_folder(directory: Path) -> None:
    files = [directory] if directory.is_file() else sorted(directory.glob("*"))
    gguf = [file.name for file in files if file.suffix.lower() == ".gguf"]
    if gguf and not any(file.suffix == ".safetensors" for file in files):
        raise CheckpointError(
            f"model {str(directory)!r} is in GGUF format ({gguf[0]}), which is not supported; give"
            " the Hugging Face checkpoint (config.json and safetensors files) that it was converted"
            " from, or convert it back with transformers: AutoModelForCausalLM.from_pretrained("
            "DIR, gguf_file=...).save_pretrained(...)"
        )
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
