"""Resharding a loaded model gives the same as loading it in the new layout, without reading files,
and frees the old arrays."""

import gc
import itertools
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jdisagg.errors import LayoutError
from jdisagg.layout.axes import Layout
from models.checkpoint import LoadedModel, load_model
from models.relayout import relayout
from tests.lanes import first_quick

GOLDEN = Path(__file__).parent.parent / "golden"
MOE = ["dp=1,tp=4,ep=4", "dp=4,tp=1,ep=4", "dp=2,tp=2,ep=1", "dp=2,tp=1,ep=2", "dp=1,tp=1"]


def _load(name: str, layout: str, dtype: str = "float32") -> LoadedModel:
    parsed = Layout.parse(layout)
    return load_model(GOLDEN / name, parsed, jax.devices()[: parsed.devices], dtype=dtype)


def _check(name: str, before: str, after: str, dtype: str = "float32") -> None:
    parsed = Layout.parse(after)
    moved = relayout(_load(name, before, dtype), parsed, jax.devices()[: parsed.devices])
    expected = _load(name, after, dtype)
    assert moved.layout == parsed and moved.mesh == expected.mesh
    assert nnx.graphdef(moved.model) == nnx.graphdef(expected.model)
    ours, theirs = (
        jax.tree.leaves(nnx.state(moved.model)),
        jax.tree.leaves(nnx.state(expected.model)),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("before", "after"),
    first_quick(itertools.permutations(["dp=1,tp=2", "dp=2,tp=1", "dp=1,tp=4"], 2)),
)
def test_a_dense_model_is_what_loading_it_would_have_given(before: str, after: str) -> None:
    _check("llama_tied", before, after)


@pytest.mark.parametrize(
    ("before", "after"), first_quick([(MOE[0], MOE[1]), (MOE[1], MOE[0]), (MOE[2], MOE[3])])
)
def test_experts_move_between_devices_and_into_shards(before: str, after: str) -> None:
    _check("qwen3_moe", before, after)


def test_bfloat16_kernels_keep_the_orientation_of_the_platform() -> None:
    _check("qwen3", "dp=1,tp=2", "dp=2,tp=1", "bfloat16")


def test_padding_of_the_vocabulary_follows_the_layout() -> None:
    """Without a real difference in sizes the test would show nothing."""
    found = []
    for before, after in (("dp=1,tp=1", "dp=1,tp=4"), ("dp=1,tp=4", "dp=1,tp=1")):
        found.append(
            _load("llama_tied", before).model.stem.embedding.shape
            != _load("llama_tied", after).model.stem.embedding.shape
        )
        _check("llama_tied", before, after)
    assert found == [True, True]


def test_the_old_arrays_are_let_go_although_somebody_holds_the_loaded_model() -> None:
    loaded = _load("llama_tied", "dp=1,tp=2")
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(nnx.state(loaded.model))]
    gc.collect()
    assert old and all(leaf() is not None for leaf in old)
    moved = relayout(loaded, Layout(dp=1, tp=2), jax.devices()[2:4])
    gc.collect()
    assert not [leaf for leaf in old if leaf() is not None]
    del moved, loaded


def test_a_layout_that_does_not_fit_is_refused_before_anything_moves() -> None:
    loaded = _load("llama_tied", "dp=1,tp=2")
    with pytest.raises(LayoutError, match="does not divide"):
        relayout(loaded, Layout(dp=1, tp=3), jax.devices()[:3])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(loaded.model)))
