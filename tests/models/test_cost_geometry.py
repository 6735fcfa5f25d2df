"""A model's cost is computed from the sizes with which it is served."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.model_geometry import CostGeometry
from launch.cost_inputs import find_geometry
from models.catalog import read_config
from models.checkpoint import open_files
from models.hf_config import HfConfig

ROOT = Path(__file__).parents[2]
FIXTURES = [path.parent for path in sorted(ROOT.glob("tests/golden/*/config.json"))]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def geometry_of(**fields: object) -> CostGeometry:
    return read_config(HfConfig({**SIZES, **fields})).cost_geometry("m")


def test_the_parameters_of_a_served_model_are_those_of_its_weights() -> None:
    for directory in FIXTURES:
        shapes = open_files(directory, HfConfig.from_directory(directory)).shapes().items()
        matrices = sum(
            math.prod(shape)
            for name, shape in shapes
            if len(shape) > 1
            and not name.endswith(("bias", "norm.weight", "A_log", "_decay", "slope_rate"))
        )
        assert find_geometry(str(directory)).parameters == matrices, directory.name


def test_a_token_weighs_what_the_models_own_cache_keeps_of_it() -> None:
    for directory in FIXTURES:
        config = read_config(HfConfig.from_directory(directory))
        for dtype in ("float32", "bfloat16"):
            kept = config.kv_spec(dtype).bytes_per_token
            assert config.cost_geometry("m").kv_bytes_per_token(dtype) == kept, directory.name


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_shipped_models_are_in_the_catalogue_as_they_are(name: str) -> None:
    known = CATALOG[f"tiny-{name.replace('_', '-')}"]
    found = find_geometry(str(ROOT / "models/tiny" / name))
    assert dataclasses.replace(found, name=known.name) == known
    assert found.next_token_layers == known.next_token_layers


def test_sparse_steps_and_dense_layers_leave_the_expert_layers_that_are_served() -> None:
    found = geometry_of(model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[0])
    assert found.expert_layers == 4


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_kv_heads_that_a_config_leaves_out_are_the_familys(family: str) -> None:
    assert geometry_of(model_type=family).kv_rows()[0][0] == 8 * 2 * 8


def test_a_model_that_could_not_be_served_as_it_is_can_be_planned_for(tmp_path: Path) -> None:
    fields = {**SIZES, "model_type": "mistral", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert find_geometry(str(tmp_path)).kv_rows()[0][0] == 8 * 2 * 8
