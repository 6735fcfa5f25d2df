"""Reads config.json's `quantization_config`. Formats that `stored_forms.py` does not support raise
CheckpointError, which names the format.

The names of the tensors show which matrices are quantized, so lists of modules are not read.
Activations and KV are not quantized, even if the checkpoint requests it."""

import re
from dataclasses import dataclass
from typing import TypeVar

from jdisagg.errors import CheckpointError
from models.hf_config import HfConfig
from models.hf_fields import short

FIELD = "quantization_config"
_BY_GROUPS = "compressed-tensors"
_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed")
_AUTO_ROUND = ("auto-round", "intel/auto-round")
METHODS = ("fp8", "fbgemm_fp8", _BY_GROUPS, "awq", "gptq", "mxfp4", *_MODELOPT, *_AUTO_ROUND)
_FORMATS = (
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "dense",
)
# ModelOpt's algorithms. In MIXED_PRECISION each layer has one of the others.
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
# Formats in which auto-round packs: GPTQ with zero points less one, GPTQ with plain zero points, or
# AWQ.
_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
_WIDEST = ((1, 0), (0, 0))
_PAIR = re.compile(r"\d{1,6}x\d{1,6}")
T = TypeVar("T", str, int)
_REMEDY = "use the original checkpoint, or one quantized in another form"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Format of a checkpoint's quantized matrices.

    Attributes:
        bits: Possible numbers of bits per quantized value.
        blocks: Possible sizes (outputs, inputs) of the block of a matrix that shares one scale. A
            size of 0 covers the whole dimension. The first entry that fits the shape of the stored
            scales is used.
        zeros_less_one: Whether stored zero points are one less than the real ones (gptq).
        ordered: Whether the checkpoint has a tensor with the scale group of each input (`g_idx`).
    """

    method: str
    bits: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    zeros_less_one: bool = False
    ordered: bool = False


def stored_quantization(hf: HfConfig) -> StoredQuantization | None:
    """Raises CheckpointError."""
    stated = hf.raw(FIELD)
    if stated is None or hf.sizes_only:
        return None
    found = _Stated(stated, f"{hf.where}: {FIELD}")
    method = found.one_of("quant_method", METHODS)
    if method == _BY_GROUPS:
        return _compressed_tensors(found)
    if method == "mxfp4":
        return StoredQuantization(method, (4,), ((1, 32),))
    if method in _MODELOPT:
        return _modelopt(found)
    if method in _AUTO_ROUND:
        return _auto_round(found)
    if method == "awq":
        found.one_of("version", ("gemm", "GEMM"), "gemm")
        bits = found.one_of("bits", (4,))
        return StoredQuantization(method, (bits,), ((1, found.group("group_size")),))
    if method == "gptq":
        form = found.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        found.nothing("dynamic", "layers of other bits")
        bits = found.one_of("bits", (2, 4, 8))
        blocks = ((1, found.group("group_size")),)
        ordered = found.flag("desc_act")
        return StoredQuantization(method, (bits,), blocks, form == "gptq", ordered)
    found.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return StoredQuantization(method, (), (*found.pair("weight_block_size"), *_WIDEST))


def _compressed_tensors(found: "_Stated") -> StoredQuantization:
    found.one_of("format", (*_FORMATS, "mixed-precision"), "dense")
    found.nothing("transform_config", "rotated weights")
    if found.fields.get("sparsity_config"):
        found.inner("sparsity_config").one_of("format", ("dense",), "dense")
    bits: set[int] = set()
    blocks: list[tuple[int, int]] = []
    ordered: list[bool] = []
    groups = found.inner("config_groups")
    for name in groups.fields:
        group = groups.inner(name)
        group.one_of("format", _FORMATS, "dense")
        if group.fields.get("weights") is None:
            continue  # activations only
        weights = group.inner("weights")
        kind = weights.one_of("type", ("int", "float"), "int")
        width = weights.one_of("num_bits", (2, 4, 8) if kind == "int" else (4, 8))
        if (kind, width) == ("float", 4):
            weights.one_of("strategy", ("tensor_group", "group"))
            continue  # nvfp4 or mxfp4, whose sizes are fixed
        bits.add(width)
        ordered.append(weights.fields.get("actorder") in ("group", True))
        strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "tensor")
        if strategy == "group":
            blocks.append((1, weights.group("group_size")))
        elif strategy == "block":
            blocks += weights.pair("block_structure")
    every = bool(ordered) and all(ordered)
    return StoredQuantization(_BY_GROUPS, tuple(sorted(bits)), (*blocks, *_WIDEST), ordered=every)


def _modelopt(found: "_Stated") -> StoredQuantization:
    if "quantization" in found.fields:
        found = found.inner("quantization")
    found.one_of("quant_algo", _ALGORITHMS)
    if found.fields.get("quantized_layers"):
        layers = found.inner("quantized_layers")
        for name in layers.fields:
            layers.inner(name).one_of("quant_algo", _ALGORITHMS[:-1])
    return StoredQuantization("modelopt", (), ((128, 128), *_WIDEST))


def _auto_round(found: "_Stated") -> StoredQuantization:
    packing = found.fields.get("packing_format") or found.fields.get("backend")
    packing = _Stated({"packing_format": packing}, found.where)
    form = _PACKINGS[packing.one_of("packing_format", tuple(_PACKINGS), "auto_round:auto_gptq")]
    bits = found.one_of("bits", (4,) if form == "awq" else (2, 4, 8))
    if found.fields.get("extra_config"):
        layers = found.inner("extra_config")
        for name in layers.fields:  # 16 bits and more: the layer is not quantized
            layers.inner(name).one_of("bits", (bits, 16, 32), bits)
    blocks = ((1, found.group("group_size")),)
    if form == "awq":
        return StoredQuantization("awq", (bits,), blocks)
    return StoredQuantization("gptq", (bits,), blocks, form == "gptq")


class _Stated:
    def __init__(self, fields: object, where: str) -> None:
        if not isinstance(fields, dict):
            raise CheckpointError(f"{where} must be an object, got {short(fields)}; correct it")
        self.fields, self.where = fields, where

    def inner(self, field: str) -> "_Stated":
        return _Stated(self.fields.get(field), f"{self.where}.{field}")

    def one_of(self, field: str, known: tuple[T, ...], default: T | None = None) -> T:
        value = self.fields.get(field)
        value = default if value is None else value
        for each in known:
            if value == each and not isinstance(value, bool):
                return each
        of = "one of " if len(known) > 1 else ""
        raise self._error(field, f"must be {of}{', '.join(map(str, known))}", _REMEDY)

    def flag(self, field: str) -> bool:
        value = self.fields.get(field)
        if not isinstance(value, bool | None):
            raise self._error(field, "must be true or false", "correct it")
        return bool(value)

    def nothing(self, field: str, meaning: str) -> None:
        if self.fields.get(field):
            raise self._error(field, f"({meaning}) is not supported", _REMEDY)

    def group(self, field: str) -> int:
        value = self.fields.get(field)
        if value is None or value == -1:
            return 0
        if not _positive(value):
            raise self._error(field, "must be a positive integer or -1", "correct it")
        return int(value)

    def pair(self, field: str) -> tuple[tuple[int, int], ...]:
        value = self.fields.get(field)
        if value is None:
            return ()
        if isinstance(value, str) and _PAIR.fullmatch(value):
            value = [int(size) for size in value.split("x")]
        if not isinstance(value, list) or len(value) != 2 or not all(map(_positive, value)):
            raise self._error(field, "must be two positive integers", "correct it")
        return ((value[0], value[1]),)

    def _error(self, field: str, rule: str, remedy: str) -> CheckpointError:
        got = short(self.fields.get(field))
        return CheckpointError(f"{self.where}.{field} {rule}, got {got}; {remedy}")


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
