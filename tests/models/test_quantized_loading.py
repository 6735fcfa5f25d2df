"""A float checkpoint quantized while loading: only matrices change, under any layout."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.ops.quantized_weights import Weights, halves, quantized
from launch.convert import convert
from models.checkpoint import LoadedModel, load_model
from models.inspection import bytes_per_device, inspect
from models.relayout import relayout
from tests.lanes import first_quick
from tests.models.quantized_fixtures import GOLDEN, arrays_of, assert_same

FORMS: list[Weights] = ["int8", "int4", "fp8"]


def _load(name: str, layout: str, weights: Weights, dtype: str = "float32") -> LoadedModel:
    parsed = Layout.parse(layout)
    devices = jax.devices()[: parsed.devices]
    return load_model(GOLDEN / name, parsed, devices, dtype=dtype, weights=weights)


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    first_quick([("qwen3", "bfloat16"), ("qwen3_moe", "float32"), ("deepseek_v3", "float32")]),
)
def test_matrices_of_layers_are_quantized_and_all_else_is_as_stored(
    name: str, dtype: str, weights: Weights
) -> None:
    plain, kept = (arrays_of(_load(name, "", form, dtype)) for form in ("", weights))
    quantized_names = set()
    for path, values in kept.items():
        if path.endswith("scale"):
            continue
        if values.dtype == plain[path].dtype:
            np.testing.assert_array_equal(values, plain[path])
            continue
        quantized_names.add(path.split(".", 2)[2])
        # a kernel of bfloat16 lies as [out, in] on CPU
        axis = 1 if values.ndim == 3 or dtype == "bfloat16" else 0
        expected, scale = quantized(plain[path], axis, weights)
        if weights == "int4":
            low, high = halves(jax.numpy.asarray(values))
            both = np.stack([low, high], axis + 1).reshape(expected.shape)
            np.testing.assert_array_equal(both, expected.astype(np.int8))
        else:
            np.testing.assert_array_equal(values.view(expected.dtype), expected)
        suffix = ".scale" if path.endswith(".kernel") else "_scale"
        np.testing.assert_array_equal(kept[path.removesuffix(".kernel") + suffix], scale)
    assert {"attention.o.kernel"} <= quantized_names
    assert not any("head" in each or "router" in each for each in quantized_names)
    if name == "qwen3_moe":
        assert {"mlp.gate", "mlp.up", "mlp.down"} <= quantized_names


@pytest.mark.parametrize(
    ("name", "layout", "weights"),
    first_quick(
        [
            ("llama_tied", "dp=2,tp=2", "int4"),
            ("qwen3_moe", "dp=2,tp=2,ep=4", "int4"),
            ("deepseek_v3", "tp=2", "fp8"),
        ]
    ),
)
def test_values_do_not_depend_on_the_layout(name: str, layout: str, weights: Weights) -> None:
    """Scales cover all inputs, even if a device holds only some of them."""
    one, spread = (arrays_of(_load(name, each, weights)) for each in ("", layout))
    for path, values in spread.items():
        if not path.startswith("stem."):
            np.testing.assert_array_equal(values, one[path])


@pytest.mark.parametrize(
    ("name", "layout", "weights"),
    first_quick([("llama_tied", "tp=2", "int4"), ("qwen3_moe", "dp=2,tp=2,ep=4", "fp8")]),
)
def test_bytes_of_a_device_are_those_that_it_holds(
    name: str, layout: str, weights: Weights
) -> None:
    config = inspect(GOLDEN / name).config
    assert config is not None
    arrays = jax.tree.leaves(nnx.state(_load(name, layout, weights).model))
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert bytes_per_device(config, Layout.parse(layout), "float32", weights)[0] == held


def test_a_quantized_model_that_is_laid_out_anew_is_what_loading_it_would_have_given() -> None:
    layout = Layout.parse("dp=2,tp=1")
    moved = relayout(_load("llama_tied", "tp=2", "int4"), layout, jax.devices()[:2])
    expected = _load("llama_tied", "dp=2,tp=1", "int4")
    assert nnx.graphdef(moved.model) == nnx.graphdef(expected.model)
    assert_same(arrays_of(moved), arrays_of(expected))


@pytest.mark.ci
def test_the_orbax_form_is_refused_with_the_remedy(tmp_path: Path) -> None:
    convert(GOLDEN / "llama_tied", tmp_path / "orbax", "float32", 1)
    with pytest.raises(ConfigError, match="is in Orbax form.*give the Hugging Face directory"):
        load_model(tmp_path / "orbax", Layout(), jax.devices()[:1], weights="int8")
