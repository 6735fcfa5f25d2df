"""Reads the sizes of the model that --model names, for commands that only estimate speed and
memory. --model is a name of the model catalogue or a directory. Loads no weights and does not
import JAX."""

from dataclasses import replace
from pathlib import Path

from jdisagg.costs.catalog import CATALOG, geometry
from jdisagg.costs.engines import DEFAULT_SOFTWARE, Software
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.kv_spec import KEPT_DTYPES
from launch.flags import Given
from models.catalog import read_config
from models.gemma4_assistant_checkpoint import assistant_sizes
from models.hf_config import HfConfig
from models.hub import local_model


def find_geometry(
    model: str,
    kv_dtype: str | None = None,
    software: Software = DEFAULT_SOFTWARE,
    draft: str | None = None,
) -> CostGeometry:
    """Returns a model's sizes, which determine speed and memory.

    Args:
        model: Directory with a config.json of a served family, which is read by the same code as
            in a worker, or a name of the catalogue, which has other families too.
        draft: Folder of a Gemma 4 assistant, which is counted if tokens are drafted.
    """
    found = replace(_geometry(model), kv_dtype=KEPT_DTYPES.get(kv_dtype or "", ""))
    if draft:
        found = replace(found, assistant=assistant_sizes(HfConfig.from_directory(Path(draft))))
    return software.shape(found)


def software_of(flags: Given) -> Software:
    return Software.of(flags.engine, flags.weights, flags.speculation)


def _geometry(model: str) -> CostGeometry:
    directory = local_model(model, weights=False)
    if model in CATALOG or not directory.is_dir():
        return geometry(model)
    hf = HfConfig.from_directory(directory, sizes_only=True)
    return read_config(hf).cost_geometry(hf.where)
