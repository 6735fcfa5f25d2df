"""Converts a Hugging Face checkpoint to Orbax form, which loads under any layout.

    python -m launch.convert --source=HF_DIR --destination=DIR [--dtype=auto|float32|bfloat16] [--devices=1]

Weights are loaded over `--devices` local devices (tensor parallel; on CPU that many are made), so that a model larger than one device
can be converted; the result does not depend on it. `--dtype=auto` writes bfloat16 where all tensors are bfloat16, and float32
otherwise, so that nothing is lost.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags, logging

from jdisagg.errors import CheckpointError, JdisaggError
from jdisagg.layout.axes import Layout
from launch.assembly import prepare_runtime
from launch.console import refuse_words
from models import orbax_checkpoint
from models.checkpoint import load_config, load_model
from models.safetensors_files import SafetensorsFiles

_SOURCE = flags.DEFINE_string("source", None, "Directory with config.json and safetensors files.", required=True)
_DESTINATION = flags.DEFINE_string("destination", None, "Directory to write; made if it does not exist.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Type of the weights written.")
_DEVICES = flags.DEFINE_integer("devices", 1, "Local devices to spread the weights over while converting.", lower_bound=1)


def convert(source: Path, destination: Path, dtype: str, devices: int) -> None:
    """Loads and saves; raises `CheckpointError` or `LayoutError`, for a destination that cannot be written before anything is loaded."""
    if orbax_checkpoint.is_orbax(source):
        raise CheckpointError(f"{source} is in Orbax form already; give the Hugging Face directory")
    load_config(source)
    orbax_checkpoint.check_destination(destination)
    if dtype == "auto":
        dtype = "bfloat16" if SafetensorsFiles.from_directory(source).kinds() == {"BF16"} else "float32"
    layout = Layout(tp=devices)
    loaded = load_model(source, layout, jax.local_devices()[:devices], dtype=dtype)
    orbax_checkpoint.save(loaded.model, loaded.mesh, layout, source, destination)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        refuse_words(argv)
        prepare_runtime(_DEVICES.value, "")
        convert(Path(_SOURCE.value).expanduser(), Path(_DESTINATION.value).expanduser(), _DTYPE.value, _DEVICES.value)
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")
    print(_DESTINATION.value)


if __name__ == "__main__":
    app.run(main)
