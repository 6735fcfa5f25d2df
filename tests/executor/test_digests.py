"""Digests are equal in all processes, and differ where code or values differ."""

import enum
import subprocess
import sys
import types
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jdisagg.ops
from jdisagg.executor import digests
from jdisagg.executor.digests import (
    TRACED,
    IndigestibleError,
    LoadedCode,
    ReplacedError,
    differing,
    digest,
    is_traced,
)
from jdisagg.layout.axes import Layout
from jdisagg.ops import norm, optional_kernels
from tests.test_import_rules import GRAPH, reached

ROOT = Path(__file__).resolve().parents[2]
VALUES = """
import jax, numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jdisagg.executor.digests import LoadedCode, digest
from jdisagg.layout.axes import Layout
import models.checkpoint
graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
tree = jax.tree.structure((state, {"a": 1}))
values = Layout(tp=2), graph, tree, frozenset("names"), np.arange(3.0), PartitionSpec("dp", None)
print(digest(values, jax.nn.silu, {"b": np.float32(0.1)}), digest(LoadedCode().digests()))
"""


class _Color(enum.Enum):
    RED = 1


@dataclass
class _Foreign:
    value: int


def test_two_processes_compute_equal_digests_whatever_the_order_of_their_sets() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", VALUES],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "HOME": "/nowhere"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and len(found.pop().split()) == 2


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ((1, 2), [1, 2]),
        ((1, (2,)), ((1, 2),)),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ({1, 2}, {1, 3}),
        (Layout(tp=2), Layout(dp=2)),
        (np.zeros(2000), np.r_[np.zeros(1999), 1e-12]),
        (np.float32(0.1), np.float64(0.1)),
        (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)),
        (PartitionSpec("dp"), PartitionSpec(None, "dp")),
        (jax.nn.silu, jax.nn.gelu),
        (partial(jax.nn.gelu, approximate=True), partial(jax.nn.gelu, approximate=False)),
        (range(3), range(1, 3)),
        (np.array(1.0), np.array([1.0])),
        (np.array([1], ">i4"), np.array([16777216], "<i4")),
    ],
)
def test_values_that_differ_have_digests_that_differ(one: object, other: object) -> None:
    assert digest(one) != digest(other)


def test_the_structure_of_a_module_covers_its_static_attributes() -> None:
    def graph(epsilon: float) -> object:
        return nnx.split(nnx.RMSNorm(4, epsilon=epsilon, rngs=nnx.Rngs(0)))[0]

    assert digest(graph(1e-5)) == digest(graph(1e-5)) != digest(graph(2e-5))


@pytest.mark.parametrize(
    "value",
    [
        *(lambda: 1, jnp.ones(2), object(), _Foreign(1), _Color.RED, np.array([object()]), Path()),
        *(Layout().expert_axes, wraps(jax.nn.silu)(lambda x: x)),
    ],
)
def test_what_other_processes_cannot_identify_has_no_digest(value: object) -> None:
    with pytest.raises(IndigestibleError):
        digest({"within": [value]})


def _other(x: jax.Array) -> jax.Array:
    return x + 1


def _module_of(owner: object) -> str:
    return owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "owner, name, value",
    [
        (norm, "rms_norm", norm.layer_norm),
        (norm, "rms_norm", jax.nn.silu),
        (norm, "rms_norm", partial(norm.layer_norm, epsilon=1e-3)),
        (norm, "jnp", np),
        (norm, "EPSILON_OF_A_TEST", 1e-3),
        (norm, "TABLE_OF_A_TEST", jnp.arange(3)),
        (norm, "LAYOUT_OF_A_TEST", Layout(tp=2)),
        (optional_kernels, "PAGED_ATTENTION", "another"),
        (optional_kernels, "KERNELS_OF", {"gpu": ()}),
        (Layout, "devices", property(norm.rms_norm)),
        (Layout, "parse", classmethod(norm.rms_norm)),
    ],
)
def test_a_replaced_function_class_member_or_constant_shows_in_its_module(
    owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = LoadedCode()
    before = code.digests()
    monkeypatch.setattr(owner, name, value, raising=False)
    module = _module_of(owner)
    assert differing(before, code.digests()) == [module]
    assert differing(before, LoadedCode().digests()) == [module]
    monkeypatch.undo()
    assert code.digests() == before


def test_constants_with_other_values_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = LoadedCode(), []
    for value in (jnp.arange(3), jnp.arange(3) + 1, partial(is_traced, 1), partial(is_traced, 2)):
        monkeypatch.setattr(norm, "OF_A_TEST", value, raising=False)
        found.append(code.digests()["jdisagg.ops.norm"])
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    "value",
    [
        _other,
        lambda x: x,
        cache(_other),
        jax.jit(_other),
        partial(_other),
        partial(norm.rms_norm, _other),
        _Foreign,
        _Foreign(1),
        _Foreign(1).__class__.__init__,
        {"int4": _Foreign(1)},
        [(1, _other)],
        property(_other),
        MagicMock(),
    ],
)
@pytest.mark.parametrize("owner", [norm, Layout])
def test_code_from_elsewhere_is_named(
    owner: object, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it computes may depend on values that no digest covers."""
    code = LoadedCode()
    before = code.digests()
    monkeypatch.setattr(owner, "OF_A_TEST", value, raising=False)
    for one in (code, LoadedCode()):
        with pytest.raises(ReplacedError):
            one.digests()
    monkeypatch.undo()
    assert code.digests() == before


def test_a_function_whose_code_is_replaced_in_place_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    code = LoadedCode()
    before = code.digests()
    monkeypatch.setattr(norm.rms_norm, "__code__", norm.layer_norm.__code__)
    assert "jdisagg.ops.norm" in differing(before, code.digests())


def test_an_item_that_is_replaced_in_a_dictionary_of_a_module_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = LoadedCode()
    before = code.digests()
    monkeypatch.setitem(optional_kernels.KERNELS_OF, "gpu", ())
    assert differing(before, code.digests()) == ["jdisagg.ops.optional_kernels"]


def test_a_module_that_is_imported_later_does_not_change_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = LoadedCode()
    before = code.digests()
    later = types.ModuleType("jdisagg.ops.later")
    monkeypatch.setattr(jdisagg.ops, "later", later, raising=False)
    monkeypatch.setitem(sys.modules, later.__name__, later)
    found = code.digests()
    assert later.__name__ in found and differing(before, found) == []


def test_modules_that_only_one_process_has_loaded_do_not_differ() -> None:
    assert differing({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == []
    assert differing({"a": "1", "b": "2"}, {"a": "9", "b": "3"}) == ["a", "b"]


def test_the_sources_of_everything_that_traced_code_imports_are_covered() -> None:
    ours = (
        reached(GRAPH, "jdisagg.executor.mesh_executor")[0] | reached(GRAPH, "models.checkpoint")[0]
    )
    packages = {package.replace("/", ".") for package in TRACED}
    outside = {
        module
        for module in ours
        if not any(f"{module}.".startswith(f"{package}.") for package in packages)
        and module.rpartition(".")[0] not in ("jdisagg", "")
    }
    assert not outside


def test_a_changed_source_changes_the_digest_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "ROOT", tmp_path)
    file = tmp_path / "jdisagg" / "ops" / "norm.py"
    file.parent.mkdir(parents=True)
    found = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        found.append(digests.digest_of_sources.__wrapped__())
    assert len(set(found)) == 2
