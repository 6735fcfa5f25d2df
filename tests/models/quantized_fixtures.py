"""Checkpoints in the forms of `models/stored_forms.py`, written number by number from the formats'
definitions, each with the float matrices that it defines."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.layout.axes import Layout
from models.checkpoint import LoadedModel, load_model
from models.parameter_tree import parameter_shapes

GOLDEN = Path(__file__).parent.parent / "golden"
QUANTIZED = re.compile(r"(self_attn|mlp)\.(.*\.)?\w+_proj(_with_mqa)?\.weight$")
Tensors = dict[str, np.ndarray]
Keep = Callable[[str, tuple[int, int], np.random.Generator], tuple[np.ndarray, Tensors]]
GROUP = 8


def _words(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Packs number by number. Number order[i] of each word is at its bits i * `bits`."""
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
    """Computes w [out, in] in float32 from a formula for one value."""
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


def e2m1(half: int) -> float:
    """A sign, two bits of an exponent, one of a mantissa; no infinities."""
    exponent, mantissa = (half >> 1) & 3, half & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if half & 8 else size


def _fp4(ends: tuple[str, str, str], *, group: int = 16, divided: bool = False) -> Keep:
    """Four bits a number, two in a byte, and a scale of one byte a group. `ends`: of the names of
    numbers, scales and the matrix's own scale, which MXFP4 has none of."""

    def keep(
        name: str, shape: tuple[int, int], random: np.random.Generator
    ) -> tuple[np.ndarray, Tensors]:
        base, grid = name.removesuffix("weight"), (shape[0], -(-shape[1] // group))
        halves = random.integers(0, 16, shape)
        pairs = (halves[:, ::2] | halves[:, 1::2] << 4).astype(np.uint8)
        if ends[2]:
            scale = random.uniform(1, 300, grid).astype(ml_dtypes.float8_e4m3fn)
            whole = np.array(40000.0 if divided else 2.5e-5, np.float32)
            times = scale.astype(np.float32)
            times = times / whole if divided else times * whole
            beside = {ends[2]: whole.reshape(1) if divided else whole}
        else:
            scale = random.integers(120, 123, grid).astype(np.uint8)
            times, beside = 2.0 ** (scale.astype(np.float64) - 127), {}
        tensors = {ends[0]: pairs, ends[1]: scale} | beside
        found = _each(shape, lambda row, at: e2m1(halves[row, at]) * times[row, at // group])
        return found, {base + end: np.asarray(values) for end, values in tensors.items()}

    return keep


def _four_axes(
    name: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[np.ndarray, Tensors]:
    q = random.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scale = random.uniform(0.1, 0.5, (-(-shape[0] // 128), 1, 1, 1)).astype(np.float32)
    whole = _each(shape, lambda row, column: float(q[row, column]) * scale[row // 128, 0, 0, 0])
    return whole, {name: q, f"{name}_scale": scale}


def stated(fmt: str, **weights: object) -> dict[str, object]:
    group = {"weights": {"type": "int", **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"g": group}}


GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AUTO_ROUND: dict[str, object] = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP}
BY_GROUP: dict[str, object] = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMS: dict[str, tuple[Keep, dict[str, object]]] = {
    "fp8-blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [12, 20]}),
    "pack-quantized": (_packed(4), stated("pack-quantized", **BY_GROUP)),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (_gptq(4), GPTQ),
    "fp8-tensor": (
        _scaled(ml_dtypes.float8_e4m3fn, channels=False),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "float-quantized": (
        _scaled(ml_dtypes.float8_e4m3fn, channels=True),
        stated("float-quantized", num_bits=8, strategy="channel", type="float"),
    ),
    "int-quantized": (
        _scaled(np.int8, channels=True),
        stated("int-quantized", num_bits=8, strategy="channel"),
    ),
    "int-zeros": (
        _scaled(np.int8, channels=True, zeros=True),
        stated("int-quantized", num_bits=8, strategy="channel"),
    ),
    "pack-channels": (
        _packed(4, group=1000),
        stated("pack-quantized", num_bits=4, strategy="channel"),
    ),
    "pack-8": (_packed(8), stated("pack-quantized", **BY_GROUP | {"num_bits": 8})),
    "pack-zeros": (_packed(4, zeros=True), stated("pack-quantized", **BY_GROUP)),
    "pack-ordered": (_packed(4, ordered=True), stated("pack-quantized", **BY_GROUP)),
    "gptq-ordered": (_gptq(4, ordered=True), GPTQ | {"desc_act": True}),
    "gptq-v2": (_gptq(4, less=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-8": (_gptq(8), GPTQ | {"bits": 8}),
    "gptq-2": (_gptq(2), GPTQ | {"bits": 2}),
    "modelopt-nvfp4": (
        _fp4(("weight", "weight_scale", "weight_scale_2")),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
    "nvfp4-packed": (
        _fp4(("weight_packed", "weight_scale", "weight_global_scale"), divided=True),
        stated("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
    ),
    "mxfp4-packed": (
        _fp4(("weight_packed", "weight_scale", ""), group=32),
        stated("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "modelopt-fp8": (
        _scaled(ml_dtypes.float8_e4m3fn, channels=False),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "modelopt-blocks": (_four_axes, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
    "auto-round": (
        _gptq(4),
        AUTO_ROUND
        | {"packing_format": "auto_round:auto_gptq", "extra_config": {"x": {"bits": 16}}},
    ),
    "auto-round-2": (_gptq(4, less=0), AUTO_ROUND | {"packing_format": "auto_round"}),
    "auto-round-awq": (_awq, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
}


def written(directory: Path, fixture: str, form: str) -> tuple[Path, Path, Tensors]:
    """Writes the fixture with other matrices, quantized and in float32, and returns both folders
    and the tensors of the former."""
    keep, config = FORMS[form]
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
    state(paths[0], config)
    return *paths, kept


def state(directory: Path, quantization: dict[str, object]) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"quantization_config": quantization}))


def loaded(directory: Path, layout: str = "", weights: str = "") -> Tensors:
    parsed = Layout.parse(layout)
    devices = jax.devices()[: parsed.devices]
    return arrays_of(load_model(directory, parsed, devices, weights=weights))  # type: ignore[arg-type]


def arrays_of(loaded: LoadedModel) -> Tensors:
    """The parameters of a loaded model by path."""
    leaves = jax.tree.leaves(nnx.state(loaded.model))
    paths = [".".join(map(str, part.path)) for part in parameter_shapes(loaded.model)]
    return dict(zip(paths, map(np.asarray, leaves), strict=True))


def assert_same(found: Tensors, expected: Tensors) -> None:
    """Every parameter equals that of another loaded model."""
    for path, values in found.items():
        np.testing.assert_array_equal(values, expected[path], path)
