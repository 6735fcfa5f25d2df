"""Checkpoints that are quantized already are the models that their formats' definitions say: value
by value, whatever the layout, and what a format lacks or adds is said by name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import Layout
from jdisagg.ops.quantized_weights import halves
from models.checkpoint import load_config, load_model
from models.inspection import inspect
from models.parameter_tree import parameter_shapes
from tests.lanes import first_quick

GOLDEN = Path(__file__).parent.parent / "golden"
QUANTIZED = re.compile(r"(self_attn|mlp)\.(.*\.)?\w+_proj(_with_mqa)?\.weight$")
Tensors = dict[str, np.ndarray]
Keep = Callable[[str, tuple[int, int], np.random.Generator], tuple[np.ndarray, Tensors]]
GROUP = 8


def _words(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """One number after the other, number order[i] of each word at its bits i * `bits`."""
    each = 32 // bits
    order = order or tuple(range(each))
    shape = list(numbers.shape)
    shape[axis] = -(-shape[axis] // each)
    words = np.zeros(shape, np.uint64)
    for at, number in np.ndenumerate(numbers):
        place = list(at)
        place[axis], inside = divmod(at[axis], each)
        words[tuple(place)] |= np.uint64(int(number) << bits * order.index(inside))
    return words.astype(np.uint32).view(np.int32)


def _scales(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.uniform(0.01, 0.05, shape).astype(np.float16)


def _each(shape: tuple[int, int], value: Callable[[int, int], float]) -> np.ndarray:
    """w [out, in] in float32, by the formula of one value of it."""
    found = [[value(row, column) for column in range(shape[1])] for row in range(shape[0])]
    return np.array(found, np.float64).astype(np.float32)


def _fp8_blocks(
    name: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[np.ndarray, Tensors]:
    q = random.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scale = random.uniform(0.1, 0.5, (-(-shape[0] // 12), -(-shape[1] // 20))).astype(np.float32)
    whole = _each(shape, lambda row, column: float(q[row, column]) * scale[row // 12, column // 20])
    return whole, {name: q, f"{name}_scale_inv": scale}


def _scaled(kind: type, channels: bool, zeros: bool = False) -> Keep:
    def keep(
        name: str, shape: tuple[int, int], random: np.random.Generator
    ) -> tuple[np.ndarray, Tensors]:
        q = (20 * random.normal(size=shape)).astype(kind)
        scale = _scales(random, shape[0] if channels else 1, 1)
        zero = random.integers(-9, 9, scale.shape).astype(np.int8)
        tensors = {name: q, f"{name}_scale": scale if channels else scale.reshape(1)}
        tensors |= {f"{name}_zero_point": zero} if zeros else {}

        def value(row: int, column: int) -> float:
            at = row if channels else 0
            return (float(q[row, column]) - (zero[at, 0] if zeros else 0)) * float(scale[at, 0])

        return _each(shape, value), tensors

    return keep


def _packed(bits: int, *, zeros: bool = False, ordered: bool = False, group: int = GROUP) -> Keep:
    def keep(
        name: str, shape: tuple[int, int], random: np.random.Generator
    ) -> tuple[np.ndarray, Tensors]:
        middle, groups = 1 << (bits - 1), max(1, shape[1] // group)
        q = random.integers(-middle, middle, shape)
        zero = random.integers(-middle, middle, (shape[0], groups))
        scale = _scales(random, shape[0], groups)
        of = np.arange(shape[1]) // group
        if ordered:
            random.shuffle(of)
        tensors = {
            f"{name}_packed": _words(q + middle, bits, 1),
            f"{name}_scale": scale,
            f"{name}_shape": np.array(shape, np.int64),
        }
        tensors |= {f"{name}_zero_point": _words(zero + middle, bits, 0)} if zeros else {}
        tensors |= {f"{name}_g_idx": of.astype(np.int32)} if ordered else {}

        def value(row: int, column: int) -> float:
            subtracted = zero[row, of[column]] if zeros else 0
            return (q[row, column] - subtracted) * float(scale[row, of[column]])

        return _each(shape, value), tensors

    return keep


def _awq(
    name: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[np.ndarray, Tensors]:
    (out, into), order = shape, (0, 2, 4, 6, 1, 3, 5, 7)
    base = name.removesuffix("weight")
    q = random.integers(0, 16, (into, out))
    zero = random.integers(0, 16, (into // GROUP, out))
    scale = _scales(random, into // GROUP, out)
    tensors = {
        f"{base}qweight": _words(q, 4, 1, order),
        f"{base}qzeros": _words(zero, 4, 1, order),
        f"{base}scales": scale,
    }

    def value(row: int, column: int) -> float:
        of = column // GROUP
        return (q[column, row] - zero[of, row]) * float(scale[of, row])

    return _each(shape, value), tensors


def _gptq(bits: int, less: int = 1, *, ordered: bool = False) -> Keep:
    def keep(
        name: str, shape: tuple[int, int], random: np.random.Generator
    ) -> tuple[np.ndarray, Tensors]:
        (out, into), most = shape, 1 << bits
        base = name.removesuffix("weight")
        q = random.integers(0, most, (into, out))
        zero = random.integers(1, most, (into // GROUP, out))
        scale = _scales(random, into // GROUP, out)
        of = np.arange(into) // GROUP
        if ordered:
            random.shuffle(of)
        tensors = {
            f"{base}qweight": _words(q, bits, 0),
            f"{base}qzeros": _words(zero - less, bits, 1),
            f"{base}scales": scale,
            f"{base}g_idx": of.astype(np.int32),
        }

        def value(row: int, column: int) -> float:
            return (q[column, row] - zero[of[column], row]) * float(scale[of[column], row])

        return _each(shape, value), tensors

    return keep


def _stated(fmt: str, **weights: object) -> dict[str, object]:
    group = {"weights": {"type": "int", **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"g": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
BY_GROUP = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMS: dict[str, tuple[Keep, dict[str, object]]] = {
    "fp8-blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [12, 20]}),
    "pack-quantized": (_packed(4), _stated("pack-quantized", **BY_GROUP)),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (_gptq(4), GPTQ),
    "fp8-tensor": (
        _scaled(ml_dtypes.float8_e4m3fn, channels=False),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "float-quantized": (
        _scaled(ml_dtypes.float8_e4m3fn, channels=True),
        _stated("float-quantized", num_bits=8, strategy="channel", type="float"),
    ),
    "int-quantized": (
        _scaled(np.int8, channels=True),
        _stated("int-quantized", num_bits=8, strategy="channel"),
    ),
    "int-zeros": (
        _scaled(np.int8, channels=True, zeros=True),
        _stated("int-quantized", num_bits=8, strategy="channel"),
    ),
    "pack-channels": (
        _packed(4, group=1000),
        _stated("pack-quantized", num_bits=4, strategy="channel"),
    ),
    "pack-8": (_packed(8), _stated("pack-quantized", **BY_GROUP | {"num_bits": 8})),
    "pack-zeros": (_packed(4, zeros=True), _stated("pack-quantized", **BY_GROUP)),
    "pack-ordered": (_packed(4, ordered=True), _stated("pack-quantized", **BY_GROUP)),
    "gptq-ordered": (_gptq(4, ordered=True), GPTQ | {"desc_act": True}),
    "gptq-v2": (_gptq(4, less=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-8": (_gptq(8), GPTQ | {"bits": 8}),
    "gptq-2": (_gptq(2), GPTQ | {"bits": 2}),
}


def _written(directory: Path, fixture: str, form: str) -> tuple[Path, Path, Tensors]:
    """The fixture with other matrices: quantized, and the same in float32; and the tensors of the
    former."""
    keep, stated = FORMS[form]
    random = np.random.default_rng(5)
    kept: Tensors = {}
    plain: Tensors = {}
    for name, values in load_file(GOLDEN / fixture / "model.safetensors").items():
        if not QUANTIZED.search(name):
            kept[name] = plain[name] = values
            continue
        plain[name], tensors = keep(name, (values.shape[0], values.shape[1]), random)
        kept |= tensors
    assert kept.keys() != plain.keys()
    paths = directory / "quantized", directory / "plain"
    for path, tensors in zip(paths, (kept, plain), strict=True):
        shutil.copytree(GOLDEN / fixture, path)
        save_file(tensors, path / "model.safetensors")
    _state(paths[0], stated)
    return *paths, kept


def _state(directory: Path, stated: dict[str, object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": stated}))


def _loaded(directory: Path, layout: str = "", weights: str = "") -> Tensors:
    parsed = Layout.parse(layout)
    devices = jax.devices()[: parsed.devices]
    model = load_model(directory, parsed, devices, weights=weights).model  # type: ignore[arg-type]
    paths = [".".join(map(str, part.path)) for part in parameter_shapes(model)]
    return dict(zip(paths, map(np.asarray, jax.tree.leaves(nnx.state(model))), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_each_value_is_the_one_that_the_format_defines(form: str, tmp_path: Path) -> None:
    quantized, plain, _ = _written(tmp_path, "llama_tied", form)
    expected = _loaded(plain)
    for path, values in _loaded(quantized).items():
        np.testing.assert_array_equal(values, expected[path], path)


@pytest.mark.parametrize(
    ("fixture", "layout", "form"),
    first_quick(
        [
            ("llama_tied", "tp=4", "awq"),
            ("qwen3_moe", "dp=2,tp=2,ep=4", "pack-quantized"),
            ("qwen3_moe", "dp=2,tp=2", "gptq-ordered"),
            ("qwen3_moe", "tp=2,ep=2", "fp8-blocks"),
            ("deepseek_v3", "tp=2", "fp8-blocks"),
        ]
    ),
)
def test_devices_read_their_own_slices_of_experts_and_heads_too(
    fixture: str, layout: str, form: str, tmp_path: Path
) -> None:
    quantized, plain, _ = _written(tmp_path, fixture, form)
    expected = _loaded(plain, layout)
    for path, values in _loaded(quantized, layout).items():
        np.testing.assert_array_equal(values, expected[path], path)


@pytest.mark.parametrize(
    ("form", "weights", "fixture", "layout"),
    first_quick(
        [
            ("int-quantized", "int8", "llama_tied", "tp=2"),
            ("float-quantized", "fp8", "llama_tied", ""),
            ("fp8-tensor", "fp8", "llama_tied", ""),
            ("pack-channels", "int4", "llama_tied", "tp=2"),
            ("float-quantized", "fp8", "qwen3_moe", "dp=2,tp=2,ep=4"),
            ("pack-channels", "int4", "qwen3_moe", "tp=2"),
        ]
    ),
)
def test_numbers_of_the_form_that_is_asked_for_are_kept_as_they_are(
    form: str, weights: str, fixture: str, layout: str, tmp_path: Path
) -> None:
    """One scale an output, and not rounded again."""
    quantized, plain, _ = _written(tmp_path, fixture, form)
    expected, kept = _loaded(plain), 0
    found = _loaded(quantized, layout, weights)
    for path, values in found.items():
        if path.endswith("scale") or path.startswith("stem."):
            continue
        suffix = ".scale" if path.endswith(".kernel") else "_scale"
        scale = found.get(path.removesuffix(".kernel") + suffix)
        if scale is None:
            np.testing.assert_array_equal(values, expected[path], path)
            continue
        kept += 1
        axis = values.ndim - 2
        if weights == "int4":
            low, high = (np.asarray(half) for half in halves(jax.numpy.asarray(values)))
            values = np.stack([low, high], axis + 1).reshape(expected[path].shape)
        elif weights == "fp8":
            values = values.view(ml_dtypes.float8_e4m3fn)
        restored = values.astype(np.float32) * np.expand_dims(scale, axis)
        np.testing.assert_array_equal(restored, expected[path], path)
    assert kept >= 7


def test_other_numbers_are_rounded_once_more(tmp_path: Path) -> None:
    quantized, plain, _ = _written(tmp_path, "llama_tied", "awq")
    expected = _loaded(plain, weights="int8")
    for path, values in _loaded(quantized, weights="int8").items():
        np.testing.assert_array_equal(values, expected[path], path)


def test_what_is_left_in_float_needs_no_list_and_scales_of_activations_are_left_aside(
    tmp_path: Path,
) -> None:
    quantized, plain, tensors = _written(tmp_path, "llama_tied", "fp8-tensor")
    left = "model.layers.1.mlp.up_proj.weight"
    tensors[left] = load_file(plain / "model.safetensors")[left]
    del tensors[f"{left}_scale"]
    for name in ("mlp.down_proj.input_scale", "self_attn.k_scale"):
        tensors[f"model.layers.0.{name}"] = np.ones(1, np.float32)
    save_file(tensors, quantized / "model.safetensors")
    expected = _loaded(plain)
    for path, values in _loaded(quantized).items():
        np.testing.assert_array_equal(values, expected[path], path)


@pytest.mark.parametrize(
    ("form", "beside"),
    [
        ("fp8-blocks", "weight_scale_inv"),
        ("pack-zeros", "weight_scale"),
        ("awq", "qzeros"),
        ("gptq", "scales"),
    ],
)
def test_a_matrix_that_lacks_what_restores_it_is_named(
    form: str, beside: str, tmp_path: Path
) -> None:
    path, _, tensors = _written(tmp_path, "llama_tied", form)
    name = f"model.layers.1.mlp.down_proj.{beside}"
    whole = tensors.pop(name)
    for there, said in ((None, "is missing"), (whole[:-1].copy(), "is of shape")):
        save_file(tensors | ({} if there is None else {name: there}), path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*{said}"):
            load_model(path, Layout(), jax.devices()[:1])
        assert name in "".join(inspect(path).missing)


def test_a_group_that_does_not_exist_is_refused_by_its_name(tmp_path: Path) -> None:
    path, _, tensors = _written(tmp_path, "llama_tied", "gptq-ordered")
    tensors["model.layers.0.mlp.up_proj.g_idx"][3] = 99
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.g_idx must name groups"):
        load_model(path, Layout(), jax.devices()[:1])


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method must be one of fp8, fbgemm_fp8, compre"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3, got 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be one of gemm"),
        (GPTQ | {"bits": 3}, "bits must be one of 2, 4, 8, got 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, r"dynamic \(layers of other bits\) is not supported"),
        (GPTQ | {"group_size": 0}, "group_size must be a positive integer or -1, got 0"),
        (_stated("nvfp4-pack-quantized"), "format must be one of naive-quantized"),
        (_stated("pack-quantized", num_bits=3), r"g\.weights\.num_bits must be one of 2, 4, 8"),
        (
            _stated("float-quantized", type="float", num_bits=8, strategy="tensor_group"),
            "strategy must be one of tensor, channel, group, block",
        ),
        (_stated("dense") | {"transform_config": {"x": 1}}, "rotated weights"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object, got None"),
        ("int4", "quantization_config must be an object, got 'int4'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(stated: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_tied", path)
    _state(path, stated)
    with pytest.raises(CheckpointError, match=said):
        load_config(path)
    (one,) = inspect(path).missing
    assert re.search(said, one)


def test_numbers_without_a_word_of_what_they_are_do_not_load(tmp_path: Path) -> None:
    path, _, _ = _written(tmp_path, "llama_tied", "int-quantized")
    shutil.copy(GOLDEN / "llama_tied/config.json", path)
    with pytest.raises(CheckpointError, match="weight_scale"):
        load_model(path, Layout(), jax.devices()[:1])
    assert any("of a type that is not read" in text for text in inspect(path).missing)
