"""Compiled programs by key: compiled ahead of time, counted, never recompiled.

A program is lowered from abstract arguments with explicit shardings and kept as a compiled executable: a call whose shapes
differ raises instead of compiling (rule 12). `compilations` counts what was compiled; it stands still in steady state.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Programs:
    """One mesh's executables. Building is thread-safe, so that warm-up may compile several at once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.compilations = 0
        self._built: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The executable of `key`, built on first use."""
        program = self._built.get(key)
        if program is None:
            built = build()
            with self._lock:
                program = self._built.setdefault(key, built)
                self.compilations += program is built
        return program

    def compile(
        self,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        """`shard_map`s `body` over the mesh, compiles it for `arguments` (arrays or shapes) and donates the named ones.

        in_specs and out_specs are pytrees of PartitionSpec that match the arguments and results leaf by leaf; shardings of
        donated arguments and their results are equal and explicit, else XLA would not alias them.
        """
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        in_shardings, out_shardings = self._shardings(in_specs), self._shardings(out_specs)
        abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arguments, in_shardings)
        jitted = jax.jit(mapped, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate)
        return jitted.lower(*abstract).compile()

    def _shardings(self, specs: Any) -> Any:
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)
