"""Caches compiled programs by key, and puts host arrays on the mesh. No program is compiled twice.

A program is compiled ahead of time from abstract arguments with explicit shardings. A call with
other shapes raises an error instead of compiling again.

A mesh may span several processes, each of which runs the same programs in the same order. Host
arrays are then put on the mesh by a callback, because `device_put` would communicate with the other
processes."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jdisagg.layout.platforms import traits_of
from jdisagg.ops.device_layout import kept_format

_logger = logging.getLogger(__name__)

SLOW_SECONDS = 20.0  # compilations that take longer are logged, while they run and at their end
RANK = PartitionSpec("dp")
BLOCK_SPEC = PartitionSpec("dp", None, "kv")  # as `transfer.channel.block_sharding`
# PartitionSpecs of arrays that are exchanged with the host and other meshes. They have XLA's own
# order of axes in memory. All other arrays are weights and pages.
TRAVELLING = (RANK, BLOCK_SPEC, PartitionSpec())


# Tracing a program runs Python code without pauses. With this switch interval, other threads such
# as the event loop wait this long for the interpreter instead of Python's default of 5 ms.
TURN_SECONDS = 2e-4


class _ShortTurns:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(TURN_SECONDS, self._usual))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual)


_short_turns = _ShortTurns()


def _name(key: Hashable) -> str:
    parts = key if isinstance(key, tuple) else (key,)
    return " ".join(str(part) for part in parts if isinstance(part, (str, int)))


@contextlib.contextmanager
def _slow_logged(key: Hashable) -> Iterator[None]:
    began, name = time.monotonic(), _name(key)
    text = "compiling program %s for %.0f s"
    timer = threading.Timer(SLOW_SECONDS, _logger.info, (text, name, SLOW_SECONDS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if (seconds := time.monotonic() - began) > SLOW_SECONDS:
            _logger.info("program %s compiled in %.0f s", name, seconds)


class MissingProgram(Exception):
    """Raised for a program that is not compiled yet."""

    def __init__(self, compile: Callable[[], object]) -> None:
        super().__init__("the program is not compiled yet")
        self.compile = compile


class Programs:
    """The compiled programs of one mesh. Thread-safe, so that warm-up can compile several at once.

    The first pipeline stage of an instance also holds the programs of the `later` stages."""

    def __init__(self, mesh: Mesh, *later: Mesh) -> None:
        self.mesh = mesh
        self.later = tuple(map(Programs, later))
        self.platform = str(mesh.devices.flat[0].platform)
        self.spans_processes = any(
            device.process_index != jax.process_index() for device in mesh.devices.flat
        )
        self._compilations = 0
        self.compiler_options = dict(traits_of(self.platform).compiler_options)
        self._float32_options = dict(traits_of(self.platform).float32_options)
        self._by_rank = NamedSharding(mesh, RANK)
        self._built: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}
        self._this_thread = threading.local()

    @property
    def stages(self) -> tuple["Programs", ...]:
        return self, *self.later

    @property
    def compilations(self) -> int:
        return self._compilations + sum(stage.compilations for stage in self.later)

    def add_options(self, options: Mapping[str, str | bool]) -> None:
        """Adds options of XLA to those of programs that are compiled later."""
        for stage in self.stages:
            stage.compiler_options.update(options)

    @contextlib.contextmanager
    def only_compiled(self) -> Iterator[None]:
        """Returns a context in which `get` on this thread raises MissingProgram instead of
        compiling a program."""
        for stage in self.stages:
            stage._this_thread.only_compiled = True
        try:
            yield
        finally:
            for stage in self.stages:
                stage._this_thread.only_compiled = False

    @property
    def readable_spec(self) -> PartitionSpec:
        """PartitionSpec of arrays that `readable` returns: sharded by dp rank, or replicated if the
        mesh spans processes."""
        return PartitionSpec() if self.spans_processes else RANK

    def readable(self, local: Any) -> Any:
        """Makes this dp rank's arrays [1, ...] readable by every process of the mesh. Called at the
        end of a program, inside `shard_map`."""
        if not self.spans_processes or self.mesh.shape["dp"] == 1:
            return local
        return jax.tree.map(
            lambda array: jax.lax.all_gather(array, "dp", axis=0, tiled=True), local
        )

    def put(self, host: Any) -> Any:
        """Puts each dp rank's part of host arrays [ranks, ...] on the rank's devices. Every process
        must pass the same arrays. No process waits for another."""
        if not self.spans_processes:
            return jax.device_put(host, self._by_rank)

        def by_callback(array: np.ndarray) -> jax.Array:
            # Copied, because JAX may alias the slices that the callback returns, and callers reuse
            # their arrays.
            kept = array.copy()
            return jax.make_array_from_callback(
                array.shape, self._by_rank, lambda index: kept[index]
            )

        return jax.tree.map(by_callback, host)

    def receive(self, array: jax.Array) -> jax.Array:
        """Copies an array [ranks, ...] from another stage's mesh to this mesh. Each device sends
        its part to the device at the same place, which belongs to the same process
        (`layout_meshes`). Uses no host memory, and does not wait for the array."""
        if not self.spans_processes:
            return jax.device_put(array, self._by_rank)
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
        to = dict(zip(sharding.mesh.devices.flat, self.mesh.devices.flat, strict=True))
        parts = [jax.device_put(one.data, to[one.device]) for one in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, self._by_rank, parts)

    def argument(self, host: Any, *, often: bool = False) -> Any:
        """Returns host arrays in the form in which program calls accept them fastest. On a mesh of
        one device, these are the host arrays themselves, which a call transfers in a tenth of the
        time of `put`. On other meshes, `put` is called.

        Args:
            host: Pytree of arrays [ranks, ...]. The caller must not modify them afterwards.
            often: Whether several calls use the arrays. They are then transferred to an accelerator
                once, by `put`. A CPU device reads host memory.
        """
        device = self.mesh.devices.flat[0]
        direct = self.mesh.size == 1 and (not often or device.platform == "cpu")
        return host if direct else self.put(host)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec) -> Any:
        abstract = jax.ShapeDtypeStruct(shape, dtype)
        return jax.jit(
            lambda: jnp.zeros(shape, dtype), out_shardings=self._formats(abstract, spec)
        )()

    def get(self, key: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Returns the compiled program of `key`. If there is none, calls `build` to compile it.

        `build` may run on another thread, later, and while commands run: it must only read the
        shapes of arrays."""
        program = self._built.get(key)
        if program is None:
            if getattr(self._this_thread, "only_compiled", False):
                raise MissingProgram(lambda: self.get(key, build))
            with self._lock:
                building = self._building.setdefault(key, threading.Lock())
            with building:  # a thread that needs the same program waits for it
                program = self._built.get(key)
                if program is None:
                    with _short_turns, _slow_logged(key):
                        program = build()
                    with self._lock:
                        self._built[key] = program
                        self._compilations += 1
        return program

    def adopt(self, earlier: "Programs") -> None:
        """Uses the compiled programs of an earlier instance with equal role, layout, limits, model
        and mesh."""
        assert earlier.mesh == self.mesh, "executables are made for their mesh"
        self._built.update(earlier._built)
        self._compilations += earlier._compilations
        for stage, before in zip(self.later, earlier.later, strict=True):
            stage.adopt(before)

    def compile(
        self,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        """Compiles a `shard_map` of `body` over the mesh.

        Args:
            in_specs, out_specs: Pytrees of PartitionSpec that match the arguments and results leaf
                by leaf. Donated arguments and their results need equal, explicit shardings, because
                XLA aliases only such arrays.
        """
        options = self.options_of(arguments)
        try:
            with self.precision():
                traced = self._trace(self.mesh, body, arguments, in_specs, out_specs, donate)
                return traced.lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            unknown = [key for key in options if f"No such compile option: '{key}'" in str(error)]
            if not unknown:
                raise
            for kept in (self.compiler_options, self._float32_options):
                for key in unknown:
                    kept.pop(key, None)
            return self.compile(body, arguments, in_specs, out_specs, donate)

    def options_of(self, arguments: Any) -> dict[str, str | bool]:
        kinds = {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(arguments)}
        narrow = any(jnp.issubdtype(kind, jnp.floating) and kind.itemsize < 4 for kind in kinds)
        return self.compiler_options | ({} if narrow else self._float32_options)

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the platform's precision of float32 products, in which programs
        are traced and lowered."""
        return jax.default_matmul_precision(traits_of(self.platform).float32_precision)

    def _trace(
        self,
        mesh: Mesh | AbstractMesh,
        body: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...],
    ) -> jax.stages.Traced:
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        in_shardings = self._shardings(in_specs)
        in_formats, out_formats = in_shardings, self._shardings(out_specs)
        if traits_of(self.platform).row_major:
            in_formats = self._formats(arguments, in_specs)
            out_formats = self._formats(jax.eval_shape(mapped, *arguments), out_specs)
        abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arguments, in_shardings
        )
        return jax.jit(
            mapped, in_shardings=in_formats, out_shardings=out_formats, donate_argnums=donate
        ).trace(*abstract)

    def _formats(self, arrays: Any, specs: Any) -> Any:
        """On platforms that need it, the shardings of weights and pages include the order of
        axes in memory."""
        return jax.tree.map(
            lambda array, sharding: (
                sharding
                if sharding.spec in TRAVELLING
                else kept_format(len(array.shape), sharding, self.platform)
            ),
            arrays,
            self._shardings(specs),
        )

    def _shardings(self, specs: Any) -> Any:
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)
