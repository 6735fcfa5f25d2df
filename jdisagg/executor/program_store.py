"""Finds a compiled program of an earlier process without tracing it.

JAX's compilation cache (`program_cache.py`) finds an executable by the text of the lowered program.
Tracing and lowering every program takes most of the time of a start whose executables are all in
the cache. The name of an entry in this store is known before tracing: it is a digest of everything
that determines the text. An entry holds the key of the executable in JAX's cache, and the
description that JAX needs to call the executable. Entries are in the same folder as JAX's. They are
pickles, and JAX's entries are machine code, so only trusted users may write to the folder.

The name covers the source files of this project. A process can replace code at run time: a notebook
tries another attention, a test injects a fault. An entry therefore also refers to the digests of
the modules that were loaded when its program was traced. The entry is used only in a process where
each of these modules is unchanged or not loaded. While these modules hold code from elsewhere,
nothing is found or stored. Other packages, such as JAX, are known by their versions alone. A
program made of something without a digest, such as a model class of a notebook, is traced."""

import functools
import importlib.metadata
import io
import logging
import os
import pickle
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import jax

# Private names of JAX, as in `program_cache.py`. Entries follow
# `jax.experimental.serialize_executable`, except that the bytes of the executable stay in JAX's
# cache: on CPUs, an executable that was read from the cache cannot be serialized again.
from jax._src import compilation_cache as jax_cache
from jax._src import config as jax_config
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from jdisagg.executor.digests import (
    IndigestibleError,
    LoadedCode,
    ReplacedError,
    differing,
    digest,
    digest_of_sources,
    is_traced,
)
from jdisagg.executor.program_cache import ProgramCache
from jdisagg.ops.optional_kernels import switched_off

log = logging.getLogger(__name__)

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Settings of JAX that do not change programs, by the beginnings of their names.
_OTHER_SETTINGS = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_debug_log", "jax_dump", "jax_log"),
    *("jax_logging", "jax_platforms", "jax_platform_name", "jax_traceback", "jax_tracer"),
)

SUFFIX = "-program"  # of the names of entries

_loaded_code = LoadedCode()


class Entry(NamedTuple):
    """A stored program.

    Attributes:
        executable: Key of the executable in JAX's cache.
        code: Key of the digests of the modules that were loaded when the program was traced.
        call: Pickled description of the executable, its arguments and results.
    """

    executable: str
    code: str
    call: bytes


def program_store(mesh: Mesh, *made_of: object) -> "ProgramStore | None":
    """Returns the store of a mesh's programs, or None if a value that the programs depend on has no
    digest. All programs are then traced.

    Args:
        made_of: Values from which the owner of the programs was built: type, model, layout, limits,
            role. Together with a program's key and arguments they must determine the program.
    """
    try:
        return ProgramStore(mesh, digest(made_of))
    except IndigestibleError as error:
        log.info("programs are traced at each start: %s has no digest", error)
        return None


class ProgramStore:
    """The stored programs of one mesh, made by `program_store`. Thread-safe."""

    def __init__(self, mesh: Mesh, made_of: str) -> None:
        self._devices = list(mesh.devices.flat)
        self._made_of = digest(mesh.axis_names, mesh.devices.shape, self._devices, made_of)
        self._client = self._devices[0].client
        self._lock = threading.Lock()
        self._found = 0

    @property
    def found(self) -> int:
        """Number of programs that `load` has found."""
        return self._found

    def name(self, body: Callable[..., Any], *program: object) -> str | None:
        """Returns the name of a program, or None if it cannot be stored.

        Args:
            body: Function that is traced. Only functions of `TRACED` packages can be stored.
            program: The program's key, abstract arguments and options.
        """
        try:
            if not (isinstance(body, FunctionType) and is_traced(body.__module__)):
                raise IndigestibleError(f"{body}")
            what = body.__module__, body.__qualname__, program
            return digest(self._made_of, _surroundings(self._client), _settings(), what)
        except Exception as error:  # an unforeseen value must not stop a start
            _report(f"programs are traced: {type(error).__name__}: {error}")
            return None

    def load(self, name: str) -> Callable[..., Any] | None:
        """Returns a stored program. Returns None if there is no entry, if the code from which the
        program was traced was replaced, or if the entry cannot be read."""
        if (cache := self._cache()) is None:
            return None
        try:
            if (stored := cache.read(name + SUFFIX)) is None:
                return None
            entry: Entry = pickle.loads(stored)
            if differing(_code_then(cache, entry.code), _loaded_code.digests()):
                return None
            if (executable := cache.read(entry.executable)) is None:
                return None
            program = self._call(entry.call, executable)
        except ReplacedError as error:
            _report(f"programs are traced while a module holds {error}")
            return None
        except Exception as error:  # written by another version, cut short, or not readable
            log.warning("a stored program cannot be read and is compiled again: %s", error)
            return None
        with self._lock:
            self._found += 1
        return program

    def compile(
        self, name: str, trace: Callable[[], jax.stages.Traced], options: dict[str, str | bool]
    ) -> jax.stages.Compiled:
        """Calls `trace`, compiles the program, and stores it."""
        if (cache := self._cache()) is None or (before := _code_now()) is None:
            return trace().lower().compile(compiler_options=options)
        traced = trace()
        lowered = traced.lower()
        with cache.keys_asked() as keys:
            program = lowered.compile(compiler_options=options)
        after = _code_now()
        # Not stored if there is no key, because the executable is then not in JAX's cache. Not
        # stored if the program contains arrays on a device, such as weights, because the name does
        # not cover their values.
        if after is None or differing(before, after) or len(keys) != 1 or _holds_arrays(traced):
            return program
        try:
            entry = Entry(keys[0], _written_code(cache, after), _description(program))
            cache.write(name + SUFFIX, pickle.dumps(entry))
        except Exception as error:  # the program itself is compiled
            log.debug("a program is not stored: %s", error)
        return program

    def _cache(self) -> ProgramCache | None:
        """Returns JAX's compilation cache, or None if it is disabled or is not a `ProgramCache`."""
        settings = jax.config.values
        if not (settings["jax_compilation_cache_dir"] and settings["jax_enable_compilation_cache"]):
            return None
        cache = jax_cache._get_cache(self._client)
        return cache if isinstance(cache, ProgramCache) else None

    def _call(self, description: bytes, executable: bytes) -> jax.stages.Compiled:
        packed, _ = jax_cache.extract_executable_and_time(
            jax_cache.decompress_executable(executable)
        )
        devices = xla_client.DeviceList(tuple(self._devices))
        loaded = self._client.deserialize_executable(packed, devices, None)
        unpickler = _Unpickler(io.BytesIO(description), self._client, loaded)
        unloaded, arguments, results, no_kwargs = unpickler.load()
        return jax.stages.Compiled(unloaded.load(), [], arguments, results, no_kwargs=no_kwargs)


@functools.cache
def _report(text: str) -> None:
    """Logs a reason once."""
    log.info(text)


def _code_now() -> dict[str, str] | None:
    """Returns the digests of the loaded modules, or None if they cannot be computed."""
    try:
        return _loaded_code.digests()
    except Exception as error:  # code from elsewhere, or a value of an unforeseen kind
        _report(f"programs are not stored: {type(error).__name__}: {error}")
        return None


def _holds_arrays(traced: jax.stages.Traced) -> bool:
    """Returns whether a program contains values of arrays on a device."""
    todo: list[Any] = [traced.jaxpr]
    while todo:
        one = todo.pop()
        if any(isinstance(constant, jax.Array) for constant in getattr(one, "consts", ())):
            return True
        for equation in getattr(getattr(one, "jaxpr", one), "eqns", ()):
            for value in equation.params.values():
                todo += value if isinstance(value, (tuple, list)) else [value]
    return False


@functools.lru_cache(maxsize=16)
def _code_then(cache: ProgramCache, key: str) -> dict[str, str]:
    """Reads digests of modules. Raises FileNotFoundError if they are not in the folder."""
    if (stored := cache.read(key)) is None:
        raise FileNotFoundError(key)
    return pickle.loads(stored)


def _written_code(cache: ProgramCache, code: dict[str, str]) -> str:
    """Writes digests of modules if they are not in the folder, and returns their key."""
    packed = pickle.dumps(dict(sorted(code.items())))
    key = f"{digest(packed)}-code"
    if cache.read(key) != packed:
        cache.write(key, packed)
    return key


def _description(program: jax.stages.Compiled) -> bytes:
    """Returns what JAX needs to call a program, without the executable. Raises PicklingError if the
    program needs more than its arguments: constants that are passed to it, or Python functions."""
    executable: Any = program._executable
    unloaded = executable._unloaded_executable
    if program._params.const_args or unloaded.host_callbacks or unloaded.keepalive:
        raise pickle.PicklingError("it has constants or calls Python functions")
    with io.BytesIO() as file:
        parts = (unloaded, program.args_info, program.out_tree, program._no_kwargs)
        _Pickler(file, program.runtime_executable()).dump(parts)
        return file.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, executable: object) -> None:
        super().__init__(file)
        self._executable = executable

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if obj is self._executable:
            return "executable", 0
        if isinstance(obj, jax.Device):
            return "device", obj.id
        return ("client", 0) if isinstance(obj, xla_client.Client) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, client: Any, executable: object) -> None:
        super().__init__(file)
        self._client, self._executable = client, executable

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        kind, number = pid
        if kind == "executable":
            return self._executable
        return self._client if kind == "client" else _devices_of(self._client)[number]


@functools.cache
def _devices_of(client: Any) -> dict[int, Any]:
    return {device.id: device for device in client.devices()}


@functools.cache
def _surroundings(client: Any) -> str:
    """Returns a digest of everything that determines programs and does not change in this process:
    sources, versions, processor."""
    packages = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
    versions = [(name, importlib.metadata.version(name)) for name in packages]
    described = client.platform, client.platform_version
    python = platform.python_version(), platform.machine(), _processor()
    return digest(digest_of_sources(), versions, described, python)


def _processor() -> str:
    """Returns the instruction sets of the processor, for which XLA compiles CPU programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join(sorted(found))


def _settings() -> str:
    """Returns a digest of the settings that determine programs and may change in this process."""
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_OTHER_SETTINGS)
    }
    variables = [os.environ.get(name, "") for name in _VARIABLES]
    # The contexts of this thread, such as an abstract mesh. For most, only the type can be
    # compared.
    context = [f"{type(part).__name__}:{part!r}"[:200] for part in _context()]
    return digest(settings, variables, sorted(switched_off()), context)


def _context() -> list[object]:
    """Returns the values that JAX itself compares before it reuses an earlier trace, without the
    axes of programs that are being traced."""
    return [part for part in jax_config.trace_context() if type(part).__name__ != "AxisEnv"]
