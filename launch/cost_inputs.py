"""What `--model=` means where costs are computed: a name of the catalogue, or a directory. Loads no
weights and no JAX."""

from pathlib import Path

from jdisagg.costs.model_geometry import CATALOG, CostGeometry, from_hf_fields, geometry
from models.catalog import FAMILIES, read_config
from models.hf_config import HfConfig


def find_geometry(model: str) -> CostGeometry:
    """Of a model directory or a name of the catalogue. A family that we serve is read by the parser
    that serves it."""
    directory = Path(model)
    if model in CATALOG or not directory.is_dir():
        return geometry(model)
    hf = HfConfig.from_directory(directory, sizes_only=True)
    if hf.raw("model_type") in FAMILIES:
        return read_config(hf).cost_geometry(hf.where)
    return from_hf_fields(hf.fields, hf.where)
