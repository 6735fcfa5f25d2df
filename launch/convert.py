"""Converts a Hugging Face checkpoint to Orbax form, which loads under any layout.

    jdisagg convert --source=HF_DIR --destination=DIR [--dtype=auto|float32|bfloat16] [--devices=1]

Weights are loaded over --devices local devices (tensor parallel), so that a model larger than one
device can be converted. The number of devices does not change the result. --dtype=auto writes
bfloat16 if all tensors are bfloat16, and float32 if they are not, so that no precision is lost. KV
scales of the checkpoint are written to kv_scales.json."""

from pathlib import Path

import jax

from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KV_SCALES_FILE
from jdisagg.node.deployment import prepare_runtime
from launch.console import run
from launch.flags import define
from models import orbax_checkpoint
from models.checkpoint import load_config, load_kv_scales, load_model
from models.hf_weights import IN_FLOAT32
from models.kv_scales import write_kv_scales
from models.safetensors_files import SafetensorsFiles

flags = define(
    "source",
    "destination",
    "dtype",
    "devices",
    required=("source", "destination"),
    dtype="auto",
    devices=1,
)


def convert(source: Path, destination: Path, dtype: str, devices: int) -> None:
    """Converts a Hugging Face checkpoint to Orbax form. Checks the destination before it loads the
    weights.

    Raises:
        CheckpointError: The source is unreadable, or the destination cannot be written.
        LayoutError: `devices` does not divide the model.
    """
    if orbax_checkpoint.is_orbax(source):
        raise CheckpointError(f"{source} is in Orbax form already; give the Hugging Face directory")
    config = load_config(source)
    scales, origin = load_kv_scales(source)
    orbax_checkpoint.check_destination(destination)
    if dtype == "auto":
        kinds = SafetensorsFiles.from_directory(source).kinds(but=IN_FLOAT32)
        dtype = "bfloat16" if kinds == {"BF16"} else "float32"
    layout = Layout(tp=devices)
    loaded = load_model(source, layout, jax.local_devices()[:devices], dtype=dtype)
    orbax_checkpoint.save(loaded.model, loaded.mesh, layout, source, destination)
    if origin and not (destination / KV_SCALES_FILE).is_file():
        write_kv_scales(destination / KV_SCALES_FILE, config, scales, origin)


def main() -> None:
    prepare_runtime(flags.devices, "")
    convert(
        Path(flags.source).expanduser(),
        Path(flags.destination).expanduser(),
        flags.dtype,
        flags.devices,
    )
    print(flags.destination)


if __name__ == "__main__":
    run(main, flags)
