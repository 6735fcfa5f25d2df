"""Quantized checkpoints restore to the values that their formats define, under any layout, and
errors name misfitting tensors."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import Layout
from jdisagg.ops.quantized_weights import halves
from models import quantized_files
from models.checkpoint import load_model
from models.inspection import inspect
from tests.lanes import first_quick
from tests.models.configs import not_refused
from tests.models.quantized_fixtures import FORMS, GOLDEN, assert_same, e2m1, loaded, written

Change = Callable[[np.ndarray], np.ndarray | None]


@pytest.mark.parametrize(
    ("form",), first_quick(((form,) for form in FORMS), quick=14, ci=len(FORMS))
)
def test_each_value_is_the_one_that_the_format_defines(form: str, tmp_path: Path) -> None:
    quantized, plain, _ = written(tmp_path, "llama_tied", form)
    assert_same(loaded(quantized), loaded(plain))


@pytest.mark.parametrize(
    ("fixture", "layout", "form"),
    first_quick(
        [
            ("llama_tied", "tp=4", "awq"),
            ("qwen3_moe", "dp=2,tp=2,ep=4", "pack-quantized"),
            ("qwen3_moe", "dp=2,tp=2", "gptq-ordered"),
            ("qwen3_moe", "tp=2,ep=2", "fp8-blocks"),
            ("deepseek_v3", "tp=2", "fp8-blocks"),
            ("qwen3_moe", "tp=2", "modelopt-nvfp4"),
            ("llama_tied", "tp=4", "nvfp4-packed"),
        ]
    ),
)
def test_devices_read_their_own_slices_of_experts_and_heads_too(
    fixture: str, layout: str, form: str, tmp_path: Path
) -> None:
    quantized, plain, _ = written(tmp_path, fixture, form)
    assert_same(loaded(quantized, layout), loaded(plain, layout))


@pytest.mark.parametrize(
    ("form", "weights", "fixture", "layout"),
    first_quick(
        [
            ("int-quantized", "int8", "llama_tied", "tp=2"),
            ("float-quantized", "fp8", "llama_tied", ""),
            ("fp8-tensor", "fp8", "llama_tied", ""),
            ("modelopt-fp8", "fp8", "llama_tied", ""),
            ("pack-channels", "int4", "llama_tied", "tp=2"),
            ("float-quantized", "fp8", "qwen3_moe", "dp=2,tp=2,ep=4"),
            ("pack-channels", "int4", "qwen3_moe", "tp=2"),
        ]
    ),
)
def test_numbers_of_the_form_that_is_asked_for_are_kept_as_they_are(
    form: str, weights: str, fixture: str, layout: str, tmp_path: Path
) -> None:
    """One scale per output, and no second rounding."""
    quantized, plain, _ = written(tmp_path, fixture, form)
    expected, kept = loaded(plain), 0
    found = loaded(quantized, layout, weights)
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
    quantized, plain, _ = written(tmp_path, "llama_tied", "awq")
    assert inspect(quantized).stored.endswith("restored while reading")
    assert inspect(plain).stored.endswith("bytes of F32")
    assert_same(loaded(quantized, weights="int8"), loaded(plain, weights="int8"))


@pytest.mark.parametrize(
    "algorithm", ["NVFP4", {"quantized_layers": {"a": {"quant_algo": "NVFP4"}}}]
)
def test_modelopts_own_file_is_read_where_config_json_states_nothing(
    algorithm: object, tmp_path: Path
) -> None:
    quantized, plain, _ = written(tmp_path, "llama_tied", "modelopt-nvfp4")
    path = quantized / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    mixed = {"quant_algo": "MIXED_PRECISION"} | algorithm if isinstance(algorithm, dict) else {}
    inner = mixed or {"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt"}, "quantization": inner}
    (quantized / "hf_quant_config.json").write_text(json.dumps(own))
    assert_same(loaded(quantized), loaded(plain))
    assert inspect(quantized).quantization == f"modelopt {inner['quant_algo']}"


def test_what_is_left_in_float_needs_no_list_and_scales_of_activations_are_left_aside(
    tmp_path: Path,
) -> None:
    quantized, plain, tensors = written(tmp_path, "llama_tied", "fp8-tensor")
    left = "model.layers.1.mlp.up_proj.weight"
    tensors[left] = load_file(plain / "model.safetensors")[left]
    del tensors[f"{left}_scale"]
    for name in ("mlp.down_proj.input_scale", "self_attn.k_scale"):
        tensors[f"model.layers.0.{name}"] = np.ones(1, np.float32)
    save_file(tensors, quantized / "model.safetensors")
    assert_same(loaded(quantized), loaded(plain))


@pytest.fixture(scope="module")
def experts_in_float(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gpt_oss_mxfp4` with its experts restored one number after the other."""
    path = tmp_path_factory.mktemp("gpt_oss") / "plain"
    shutil.copytree(GOLDEN / "gpt_oss_mxfp4", path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        base, blocks = name.removesuffix("_blocks"), tensors.pop(name)
        scales = tensors.pop(f"{base}_scales")
        whole = np.empty((*blocks.shape[:-1], 32), np.float32)
        for at, byte in np.ndenumerate(blocks):
            scale = 2.0 ** (int(scales[at[:-1]]) - 127)
            whole[*at[:-1], 2 * at[-1]] = scale * e2m1(byte & 15)
            whole[*at[:-1], 2 * at[-1] + 1] = scale * e2m1(byte >> 4)
        tensors[base] = np.swapaxes(whole.reshape(*blocks.shape[:2], -1), 1, 2).copy()
    save_file(tensors, path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text())
    del fields["quantization_config"]
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("layout", "weights"),
    first_quick([("dp=2,tp=2", ""), ("dp=2,tp=2,ep=4", ""), ("tp=2", "int4")]),
)
def test_experts_in_mxfp4_are_those_that_the_format_defines(
    layout: str, weights: str, experts_in_float: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when restored in small pieces."""
    expected = loaded(experts_in_float, layout, weights)
    monkeypatch.setattr(quantized_files, "_AT_ONCE", 200)
    assert_same(loaded(GOLDEN / "gpt_oss_mxfp4", layout, weights), expected)


@pytest.mark.parametrize(("half",), first_quick([("gate_up_proj",), ("down_proj",)]))
def test_experts_in_mxfp4_that_lack_something_are_named(half: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / "gpt_oss_mxfp4", tmp_path / "model"))
    whole = load_file(path / "model.safetensors")
    base = f"model.layers.1.mlp.experts.{half}"
    scales, blocks = whole[f"{base}_scales"], whole[f"{base}_blocks"]
    bad = [
        ({f"{base}_scales": None}, f"{base}_scales is missing"),
        ({f"{base}_scales": scales[:-1].copy()}, f"{base}_scales is of shape"),
        ({f"{base}_blocks": blocks[..., :-1].copy()}, f"{base}_blocks is of shape"),
        ({f"{base}_blocks": None}, f"{base}_blocks is missing"),
        ({f"{base}_blocks": blocks.astype(np.int32)}, f"{base}_blocks is of type I32, not U8"),
        ({f"{base}_blocks": None, f"{base}_scales": None}, f"missing: {base} "),
        ({f"{base}_bias": None}, f"missing: {base}_bias"),
    ]
    for change, said in bad:
        tensors = {name: each for name, each in (whole | change).items() if each is not None}
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=re.escape(said)):
            load_model(path, Layout(), jax.devices()[:1])
        assert said in "".join(inspect(path).missing)
    data = (GOLDEN / "gpt_oss_mxfp4/model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_model(path, Layout(), jax.devices()[:1])


def test_a_bias_of_zeros_that_the_model_has_no_place_for_is_left_aside(tmp_path: Path) -> None:
    quantized, plain, tensors = written(tmp_path, "llama_tied", "gptq")
    name = "model.layers.0.mlp.up_proj.bias"
    for values in (np.zeros(48, np.float16), np.eye(48, dtype=np.float16)[3]):
        save_file(tensors | {name: values}, quantized / "model.safetensors")
        if values.any():
            with pytest.raises(CheckpointError, match=f"1 not known: {re.escape(name)}"):
                loaded(quantized)
            continue
        assert_same(loaded(quantized), loaded(plain))


def test_numbers_without_a_word_of_what_they_are_do_not_load(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, "llama_tied", "int-quantized")
    shutil.copy(GOLDEN / "llama_tied/config.json", path)
    with pytest.raises(CheckpointError, match="weight_scale"):
        load_model(path, Layout(), jax.devices()[:1])
    assert any("of an unsupported type" in text for text in inspect(path).missing)


def _cast(kind: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values.astype(kind)


def _shorter(values: np.ndarray) -> np.ndarray:
    return values[:-1].copy()


def _in_a_group_of_none(groups: np.ndarray) -> np.ndarray:
    return np.where(np.arange(groups.size) == 3, 99, groups).astype(groups.dtype)


MISSING, SHAPE, TYPE, PAIR = "is missing", "is of shape", "is of type ", "must be two positive int"


MISFITS: list[tuple[str, str, Change, str]] = [
    *(
        (form, beside, change, said)
        for form, beside in (
            ("fp8-blocks", "weight_scale_inv"),
            ("pack-zeros", "weight_scale"),
            ("awq", "qzeros"),
            ("gptq", "scales"),
        )
        for change, said in ((lambda _: None, MISSING), (_shorter, SHAPE))
    ),
    # groups in order would be read instead, and every value be wrong
    ("gptq-ordered", "g_idx", lambda _: None, MISSING),
    ("gptq-ordered", "g_idx", _in_a_group_of_none, "must name groups"),
    ("awq", "qweight", _cast(np.float32), TYPE),
    ("awq", "qzeros", _cast(np.int64), TYPE),
    ("awq", "scales", _cast(np.int8), TYPE),
    ("gptq", "qweight", _cast(np.float32), TYPE),
    ("gptq-ordered", "g_idx", _cast(np.float32), TYPE),
    ("pack-zeros", "weight_packed", _cast(np.float32), TYPE),
    ("fp8-blocks", "weight_scale_inv", _cast(np.int32), TYPE),
    ("pack-zeros", "weight_shape", lambda _: np.zeros(2, np.int64), PAIR),
    ("pack-zeros", "weight_shape", lambda _: np.ones(0, np.int64), PAIR),
    ("pack-zeros", "weight_shape", lambda _: np.ones(2, np.float32), PAIR),
]


def test_a_tensor_that_does_not_fit_its_form_is_named(tmp_path: Path) -> None:
    made: dict[str, tuple[Path, dict[str, np.ndarray]]] = {}
    for form in {form for form, *_ in MISFITS}:
        path, _, tensors = written(tmp_path / form, "llama_tied", form)
        made[form] = path, tensors

    def load(given: tuple[str, str, Change, str]) -> None:
        form, name, change, said = given
        path, tensors = made[form]
        changed = change(tensors[name])
        kept = {key: values for key, values in tensors.items() if key != name}
        kept |= {} if changed is None else {name: changed}
        save_file(kept, path / "model.safetensors")
        if said in (MISSING, SHAPE):
            assert name in "".join(inspect(path).missing), given
        load_model(path, Layout(), jax.devices()[:1])

    rows = []
    for form, beside, change, said in MISFITS:
        name = f"model.layers.1.mlp.down_proj.{beside}"
        rows.append((f"{re.escape(name)}.*{said}", (form, name, change, said)))
    assert not_refused(load, rows) == []
