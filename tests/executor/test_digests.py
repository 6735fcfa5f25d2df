"""Digests are equal in all processes, and differ where code or values differ."""

import enum
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jdisagg.executor import digests
from jdisagg.executor.digests import TRACED, IndigestibleError, LoadedCode, differing, digest
from jdisagg.layout.axes import Layout
from jdisagg.ops import activations, norm, optional_kernels
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
    [lambda: 1, jnp.ones(2), object(), _Foreign(1), _Color.RED, np.array([object()]), Path()],
)
def test_what_other_processes_cannot_identify_has_no_digest(value: object) -> None:
    with pytest.raises(IndigestibleError):
        digest({"within": [value]})


def _other(x: jax.Array) -> jax.Array:
    return x + 1


def _closure(scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x * scale


@pytest.mark.parametrize(
    "owner, name, value",
    [
        (activations, "SILU", _other),
        (norm, "rms_norm", _other),
        (norm, "rms_norm", _closure(2.0)),
        (norm, "rms_norm", cache(_other)),
        (norm, "jnp", types.SimpleNamespace(sqrt=_other)),
        (norm, "EPSILON_OF_A_TEST", 1e-3),
        (optional_kernels, "PAGED_ATTENTION", "another"),
        (optional_kernels, "KERNELS_OF", {"gpu": ()}),
        (Layout, "devices", property(_other)),
        (Layout, "parse", classmethod(_other)),
    ],
)
def test_a_replaced_function_class_member_or_constant_shows_in_its_module(
    owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = LoadedCode()
    before = code.digests()
    monkeypatch.setattr(owner, name, value, raising=False)
    module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__  # type: ignore[attr-defined]
    assert differing(before, code.digests()) == [module]
    assert differing(before, LoadedCode().digests()) == [module]
    monkeypatch.undo()
    assert code.digests() == before


def test_an_item_that_is_replaced_in_a_dictionary_of_a_module_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = LoadedCode()
    before = code.digests()
    monkeypatch.setitem(optional_kernels.KERNELS_OF, "gpu", ())
    assert differing(before, code.digests()) == ["jdisagg.ops.optional_kernels"]


def test_functions_that_close_over_other_values_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = LoadedCode(), []
    for scale in (2.0, 3.0):
        monkeypatch.setattr(norm, "rms_norm", _closure(scale))
        found.append(code.digests()["jdisagg.ops.norm"])
    assert len(set(found)) == 2


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
