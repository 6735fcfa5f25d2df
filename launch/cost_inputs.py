"""What `--model=` means where costs are computed: a name of the catalogue, or a directory. Loads no
weights and no JAX."""

from dataclasses import replace
from pathlib import Path

from jdisagg.costs.model_geometry import CATALOG, CostGeometry, from_hf_fields, geometry
from jdisagg.layout.kv_spec import KEPT_DTYPES
from models.catalog import FAMILIES, read_config
from models.hf_config import HfConfig


def find_geometry(model: str, kv_dtype: str | None = None) -> CostGeometry:
    """Of a model directory or a name of the catalogue, whose KV is kept in `kv_dtype` (as
    --kv_dtype). A family that we serve is read by the parser that serves it."""
    return replace(_geometry(model), kv_dtype=KEPT_DTYPES.get(kv_dtype or "", ""))


def _geometry(model: str) -> CostGeometry:
    directory = Path(model)
    if model in CATALOG or not directory.is_dir():
        return geometry(model)
    hf = HfConfig.from_directory(directory, sizes_only=True)
    if hf.raw("model_type") in FAMILIES:
        return read_config(hf).cost_geometry(hf.where)
    return from_hf_fields(hf.fields, hf.where)
