"""The planned memory of adapter slots is that of the stacks that a model makes."""

from pathlib import Path

import jax
import pytest
from flax import nnx

from jdisagg.config import InstanceConfig
from jdisagg.engine.adapter_memory import adapter_bytes
from jdisagg.layout.axes import Layout
from jdisagg.model_api import AdapterSize
from launch.cost_inputs import find_geometry
from models.checkpoint import load_config
from models.decoder import abstract_model
from tests.end_to_end.clusters import GOLDEN, LLAMA, MOE


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("layout", ["", "tp=2", "tp=2,ep=2", "dp=2,tp=2,ep=4"])
@pytest.mark.parametrize(
    "directory", [LLAMA, MOE, GOLDEN / "deepseek_v3"], ids=lambda path: path.name
)
def test_slots_take_the_planned_bytes(directory: Path, layout: str, experts: bool) -> None:
    shape, config = Layout.parse(layout), load_config(directory)
    if shape.ep > 1 and not config.geometry.experts:
        pytest.skip("the model has no experts")
    instance = InstanceConfig(layout=shape, adapters=3, adapter_rank=8, adapter_experts=experts)
    _, kv, rep = shape.mesh_shape(config.kv_heads)
    sizes, table = {"dp": shape.dp, "kv": kv, "rep": rep}, shape.axis_table()
    made = 0

    def make(dims: tuple[int, ...], axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        nonlocal made
        count = 4
        for size, axis in zip(dims, axes, strict=True):
            for over in table[axis]:
                size //= sizes[over]
            count *= size
        made += count
        return jax.ShapeDtypeStruct(dims, "float32")

    model = abstract_model(config, tp=shape.tp)
    layers = model.adapted_layers(AdapterSize(3, 8, experts), make)
    assert len(jax.tree.leaves(nnx.state(layers[0]))) > len(
        jax.tree.leaves(nnx.state(model.layers[0]))
    )
    assert adapter_bytes(find_geometry(str(directory)), instance, "float32") == made > 0


def test_without_slots_nothing_is_planned() -> None:
    assert adapter_bytes(find_geometry(str(LLAMA)), InstanceConfig(), "float32") == 0
