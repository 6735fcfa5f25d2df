"""Scales of KV stored in fp8: their sources, that they change nothing by themselves, and how much
accuracy they preserve in a model whose keys have outliers."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KV_SCALES_FILE
from jdisagg.ops.dense_attention import dense_causal_attend
from launch.convert import convert
from models.checkpoint import LoadedModel, load_kv_scales, load_model
from models.kv_calibration import largest_kept
from models.kv_scales import KVScales, chosen_scales
from models.relayout import relayout
from tests.lanes import first_quick
from tests.models.configs import not_refused
from tests.models.kv_scale_models import (
    GOLDEN,
    attend_rounded,
    copied,
    dense_logits,
    scales_by_head,
    with_outliers,
    with_scales,
)
from tests.models.sharded import sharded_logits

# plain; latents; biases and windows; windows and heads of two sizes; sinks; state beside attention
KINDS = ["llama_tied", "deepseek_v3", "qwen2_windows", "gemma4", "gpt_oss", "qwen3_next"]
SOME_QUICK = first_quick([(kind,) for kind in KINDS], ci=2)
RANDOM = np.random.default_rng(5)
IDS = RANDOM.integers(3, 131, 40).tolist()
EXPONENTS = (-7, 3, -2, 9, 0)


def _loaded(directory: Path, layout: str = "", kv_dtype: str = "fp8") -> LoadedModel:
    parsed = Layout.parse(layout)
    return load_model(directory, parsed, jax.devices()[: parsed.devices], kv_dtype=kv_dtype)


def _held(loaded: LoadedModel) -> KVScales:
    """Returns the scales of a loaded model."""
    return [
        {} if scales is None else {name: np.asarray(scales[name][...]) for name in scales}
        for scales in (getattr(layer.attention, "kv_scales", None) for layer in loaded.model.layers)
    ]


def _assert_equal(found: KVScales, expected: KVScales) -> None:
    assert [sorted(layer) for layer in found] == [sorted(layer) for layer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name])


@pytest.mark.parametrize(("dtype",), first_quick([("float32",), ("bfloat16",)], ci=0))
@pytest.mark.parametrize(("name",), SOME_QUICK)
def test_where_nothing_is_rounded_scales_change_no_bit(
    name: str, dtype: str, tmp_path: Path
) -> None:
    directory = copied(name, tmp_path)
    plain = dense_logits(directory, IDS, dtype=dtype)
    with_scales(directory, scales_by_head(directory, EXPONENTS))
    found = dense_logits(directory, IDS, dtype=dtype, kv_dtype="fp8")
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize(("name",), SOME_QUICK)
def test_what_is_kept_is_divided_by_the_scale_of_its_head(name: str, tmp_path: Path) -> None:
    directory = copied(name, tmp_path)
    scales = scales_by_head(directory, EXPONENTS)
    kept: dict[str, list[np.ndarray]] = {}
    for kv_dtype in ("", "fp8"):
        seen = kept.setdefault(kv_dtype, [])

        def attend(q_TNH, k_TKH, v_TKH, seen=seen, **how):
            seen += [np.asarray(k_TKH)] + ([] if v_TKH is None else [np.asarray(v_TKH)])
            return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)

        with_scales(directory, scales)
        model = _loaded(directory, kv_dtype=kv_dtype).model
        model(jax.numpy.asarray(IDS), jax.numpy.arange(len(IDS)), attend)
    factors = [values for layer in scales for values in layer.values()]
    for plain, divided, factor in zip(kept[""], kept["fp8"], factors, strict=True):
        np.testing.assert_array_equal(divided * factor[:, None], plain)


@pytest.mark.parametrize(
    ("name", "layout"),
    first_quick(
        [
            (name, layout)
            for layout in ("dp=2,tp=2", "tp=4", "tp=2")
            for name in ("gemma4", "deepseek_v3", "qwen2_windows")
        ],
        quick=0,
        ci=2,
    ),
)
def test_scales_lie_where_their_heads_do(name: str, layout: str, tmp_path: Path) -> None:
    """Includes heads on several devices, and a worker that changed its role."""
    directory = copied(name, tmp_path)
    exact = dense_logits(directory, IDS)
    scales = scales_by_head(directory, EXPONENTS)
    loaded = _loaded(with_scales(directory, scales), layout)
    _assert_equal(_held(loaded), scales)
    for logits_TV in sharded_logits(loaded, np.array([IDS] * loaded.layout.dp)):
        np.testing.assert_allclose(logits_TV, exact, atol=2e-4)
    moved = relayout(loaded, Layout(tp=2), jax.devices()[:2])
    _assert_equal(_held(moved), scales)
    np.testing.assert_allclose(sharded_logits(moved, np.array([IDS]))[0], exact, atol=2e-4)


@pytest.mark.parametrize("largest", [0.0, 1e-6, 3.4, 224.0, 224.1, 448.0, 1000.0, 1e9])
def test_a_scale_is_the_smallest_power_of_two_that_leaves_room(largest: float) -> None:
    """Room for values twice as large, within limits."""
    scale = float(chosen_scales(np.array([largest], np.float32))[0])
    assert np.frexp(scale)[0] == 0.5
    if largest == 0:
        assert scale == 1
    elif 2.0**-24 < scale < 2.0**24:
        assert 2 * np.float32(largest) / scale <= 448 < 2 * np.float32(largest) / (scale / 2)
    else:
        assert scale == 2.0**-24 if largest < 1 else 2.0**24


@pytest.mark.parametrize(
    ("name", "layout"),
    first_quick(
        [
            ("qwen2_windows", "dp=2,tp=4"),
            ("gemma4", "tp=4"),
            ("deepseek_v3", "tp=2"),
            ("qwen3_next", "dp=2,tp=2,ep=4"),
            ("qwen2_windows", ""),
        ],
        quick=0,
    ),
)
def test_the_largest_keys_and_values_are_found_under_any_layout(name: str, layout: str) -> None:
    directory = GOLDEN / name
    prompts = [IDS[:24], IDS[16:]]
    seen: list[list[np.ndarray]] = [[], []]
    for index, ids in enumerate(prompts):

        def attend(q_TNH, k_TKH, v_TKH, of=index, **how):
            parts = [k_TKH] if v_TKH is None else [k_TKH, v_TKH]
            seen[of] += [np.abs(np.asarray(part)).max(axis=(0, 2)) for part in parts]
            return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)

        model = _loaded(directory, kv_dtype="").model
        model(jax.numpy.asarray(ids), jax.numpy.arange(len(ids)), attend)
    expected = iter([np.maximum(one, other) for one, other in zip(*seen, strict=True)])
    for layer in largest_kept(_loaded(directory, layout, kv_dtype=""), prompts):
        for values in layer.values():
            np.testing.assert_allclose(values, next(expected), rtol=1e-5)
    assert next(expected, None) is None


@pytest.mark.parametrize(
    ("pattern", "shape"),
    first_quick(
        [
            ("self_attn.{}_scale", (2,)),
            ("self_attn.{}_proj.{}_scale", ()),
            ("self_attn.attn.{}_scale", (2, 1, 1)),
            ("self_attn.{}_scale", (1,)),
        ],
        quick=2,
    ),
)
def test_scales_of_a_checkpoint_are_rounded_up_to_powers_of_two(
    pattern: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """One number per tensor or per kv head. Layers without a scale have one."""
    directory = copied("llama_tied", tmp_path)
    path = directory / "model.safetensors"
    stored = {"k": [0.3, 2.5], "v": [0.25, 0.0011]}
    expected = {"k": [0.5, 4.0], "v": [0.25, 2.0**-9]}
    count = int(np.prod(shape))
    tensors = load_file(path)
    for side, values in stored.items():
        name = f"model.layers.1.{pattern.format(side, side)}"
        tensors[name] = np.array(values[:count], np.float32).reshape(shape)
    tensors["model.layers.1.self_attn.q_scale"] = np.ones(1, np.float32)
    save_file(tensors, path)
    ones = {name: np.ones(2, np.float32) for name in "kv"}
    heads = {
        name: np.broadcast_to(np.array(values[:count], np.float32), 2)
        for name, values in expected.items()
    }
    found = _held(_loaded(directory, "tp=2"))
    _assert_equal(found, [ones, heads])
    plain = nnx.state(_loaded(GOLDEN / "llama_tied", kv_dtype="").model)
    same = nnx.state(_loaded(directory, kv_dtype="").model)
    for ours, theirs in zip(jax.tree.leaves(same), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # the file wins
    scales = scales_by_head(directory, EXPONENTS)
    with_scales(directory, scales)
    _assert_equal(_held(_loaded(directory)), scales)


def test_a_checkpoints_scale_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    directory = copied("llama_tied", tmp_path)
    path, name = directory / "model.safetensors", "model.layers.0.self_attn.k_proj.k_scale"
    plain = load_file(path)

    def load(values: list[float]) -> None:
        save_file(plain | {name: np.array(values, np.float32)}, path)
        _loaded(directory, kv_dtype="")
        _loaded(directory)

    cases = ((r"got 1: \[0.0\]", [0.0]), ("got 1", [-1.0]), ("nan", [np.nan]), ("got 3", [1.0] * 3))
    rows = ((f"{re.escape(name)} must be 1 or 2 .*{got}.*calibr", values) for got, values in cases)
    assert not_refused(load, rows) == []


Change = Callable[[dict], object]


def _scale(*scale: float, layer: int = 0) -> Change:
    return lambda stated: stated["layers"][layer]["v"].update(scale=list(scale))


MISFITS: list[tuple[str, Change]] = [
    ("format must be 1, got None", lambda stated: stated.pop("format")),
    ("family must be 'llama', got 'phi3'", lambda stated: stated.update(family="phi3")),
    ("layers must have 2 .* got 1", lambda stated: stated["layers"].pop()),
    (r"layers\[1\] must have k, v", lambda stated: stated["layers"][1].pop("v")),
    (r"\.k\.scale must be 2 .*None", lambda stated: stated["layers"][1]["k"].clear()),
    (r"\.k\.scale must be 2 powers", lambda stated: stated["layers"][1]["k"]["scale"].pop()),
    (r"\.v\.scale .*3\.0", _scale(1.0, 3.0)),
    (r"\.v\.scale .*0\.0", _scale(1.0, 0.0)),
    ("powers of two", _scale(1.0, -2.0)),
    ("nan", _scale(1.0, float("nan"))),
    ("inf", _scale(1.0, float("inf"))),
    (r"2\^24", _scale(1.0, 2.0**25)),
    ("True", _scale(1.0, True)),
]


def test_a_file_that_does_not_fit_is_refused_by_name_with_the_remedy(tmp_path: Path) -> None:
    directory = copied("llama_tied", tmp_path)
    with_scales(directory, scales_by_head(directory, EXPONENTS))
    path = directory / KV_SCALES_FILE
    text = path.read_text()

    def load(change: Change) -> None:
        stated = json.loads(text)
        change(stated)
        path.write_text(json.dumps(stated))
        _loaded(directory)

    rows = ((f"{KV_SCALES_FILE}: .*{said}.*calibrate_kv", change) for said, change in MISFITS)
    assert not_refused(load, rows) == []
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read .*calibrate_kv"):
        _loaded(directory)
    path.unlink()
    assert load_kv_scales(directory)[1] == ""


@pytest.mark.parametrize(("of",), first_quick([("file",), ("tensors",)]))
def test_the_orbax_form_has_the_scales_of_what_it_was_made_from(of: str, tmp_path: Path) -> None:
    directory = copied("llama_tied", tmp_path)
    if of == "file":
        with_scales(directory, scales_by_head(directory, EXPONENTS))
    else:
        path = directory / "model.safetensors"
        name = "model.layers.1.self_attn.v_proj.v_scale"
        save_file(load_file(path) | {name: np.array([0.25, 3.0], np.float32)}, path)
    convert(directory, tmp_path / "orbax", "auto", 1)
    ours, theirs = _loaded(tmp_path / "orbax", "tp=2"), _loaded(directory, "tp=2")
    _assert_equal(_held(ours), _held(theirs))
    assert nnx.graphdef(ours.model) == nnx.graphdef(theirs.model)


def _calibrated(directory: Path) -> KVScales:
    """The scales come from other tokens than those evaluated."""
    other = np.random.default_rng(11).integers(3, 131, (2, 64)).tolist()
    largest = largest_kept(_loaded(directory, kv_dtype=""), other)
    return [{name: chosen_scales(values) for name, values in layer.items()} for layer in largest]


def _ones(directory: Path) -> KVScales:
    return scales_by_head(directory, (0,))


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2)))


def test_calibrated_scales_keep_what_outliers_among_keys_would_spoil(tmp_path: Path) -> None:
    """Compares teacher-forced logits with those of the same model with unrounded KV."""
    directory = with_outliers("llama_biased", tmp_path, 1000.0, 1 / 256)
    ids = np.random.default_rng(3).integers(3, 131, 96).tolist()
    exact = dense_logits(directory, ids)
    without, by_scales = (
        _error(dense_logits(directory, ids, attend_rounded(scales)), exact)
        for scales in (_ones(directory), _calibrated(directory))
    )
    assert without > 0.5, "a third of what logits deviate by: keys were cut off"
    assert by_scales < without / 3, (without, by_scales)
