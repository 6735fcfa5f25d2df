"""Digests of values and of loaded code that are equal in every process.

`digest` covers the values from which programs are made: configurations, shapes, the structure of
Flax modules, functions by name. `LoadedCode` covers the code that tracing may run, as it is in this
process, including functions, classes and constants that were replaced at run time."""

import dataclasses
import enum
import functools
import hashlib
import inspect
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

ROOT = Path(__file__).resolve().parents[2]
# Packages whose code runs while a program is traced, or whose values enter it. Modules directly in
# `jdisagg` belong to them, too.
TRACED = (
    "jdisagg/costs",
    "jdisagg/executor",
    "jdisagg/grammar",
    "jdisagg/layout",
    "jdisagg/messages",
    "jdisagg/ops",
    "jdisagg/scheduler",
    "jdisagg/transfer",
    "models",
)
# Types and functions of these packages are named by module and name. Their versions or sources are
# part of a program's name.
KNOWN = ("builtins", "flax", "jax", "jaxlib", "jdisagg", "ml_dtypes", "models", "numpy")
_IGNORED = {
    *("__annotations__", "__annotate__", "__builtins__", "__cached__", "__doc__", "__dict__"),
    *("__file__", "__firstlineno__", "__loader__", "__path__", "__spec__", "__weakref__"),
    *("__slotnames__", "__static_attributes__", "_abc_impl"),
}


class IndigestibleError(Exception):
    """A value has no digest that is equal in every process."""


def digest(*values: object) -> str:
    """Returns a hash of values that other processes with equal values compute, too.

    Args:
        values: Numbers, texts, enums, dtypes, NumPy arrays, PartitionSpecs, tree definitions, types
            and named functions of `KNOWN` packages, objects with an attribute `digest`, and
            dataclasses and containers of these.

    Raises:
        IndigestibleError: A value is of another type, such as an array on a device or a lambda.
    """
    text = hashlib.sha256()
    for part in _parts(values):
        text.update(part.encode())
        text.update(b"\0")
    return text.hexdigest()


def _parts(value: Any) -> Iterator[str]:
    kind = type(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield f"{kind.__name__}:{value!r}"
    elif isinstance(value, enum.Enum):
        yield f"{_name(kind)}.{value.name}"
    elif isinstance(getattr(value, "digest", None), str):
        yield value.digest
    elif isinstance(value, np.dtype):
        yield f"dtype:{value.str}:{value.name}"
    elif isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            raise IndigestibleError("an array of objects")
        whole = np.ascontiguousarray(value)
        content = hashlib.sha256(whole.tobytes()).hexdigest()
        yield f"array:{whole.dtype.name}:{whole.shape}:{content}"
    elif isinstance(value, (PartitionSpec, range)):
        yield f"{kind.__name__}:{value!r}"
    elif isinstance(value, jax.tree_util.PyTreeDef):
        yield _without_addresses(str(value))
    elif isinstance(value, (set, frozenset)):
        yield f"{_name(kind)}:{sorted(digest(item) for item in value)}"
    elif isinstance(value, Mapping):
        yield f"{_name(kind)}:{len(value)}"
        for item in value.items():
            yield from _parts(item)
    elif isinstance(value, (tuple, list)):
        yield f"{_name(kind)}:{len(value)}"
        for item in value:
            yield from _parts(item)
    elif isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        yield _name(value)
    elif isinstance(value, functools.partial):
        yield from _parts(("partial", value.func, value.args, value.keywords))
    elif dataclasses.is_dataclass(value):
        yield _name(kind)
        for field in dataclasses.fields(value):
            yield field.name
            yield from _parts(getattr(value, field.name))
    else:
        raise IndigestibleError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def _name(value: Any) -> str:
    """Returns the full name of a type or function that the name identifies."""
    module, name = getattr(value, "__module__", None) or "", value.__qualname__
    if module.partition(".")[0] not in KNOWN or "<" in name:
        raise IndigestibleError(f"{module}.{name}")
    return f"{module}.{name}"


def _without_addresses(text: str) -> str:
    if " at 0x" in text:
        raise IndigestibleError(text)
    return text


@functools.cache
def digest_of_sources() -> str:
    """Returns a hash of the source files of the `TRACED` packages."""
    files = [*ROOT.glob("jdisagg/*.py")]
    files += [path for package in TRACED for path in (ROOT / package).rglob("*.py")]
    text = hashlib.sha256()
    for path in sorted(files):
        text.update(str(path.relative_to(ROOT)).encode())
        text.update(path.read_bytes())
    return text.hexdigest()


class LoadedCode:
    """Digests of the loaded modules of the `TRACED` packages. Thread-safe. A module is read again
    only when one of its values was replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[list[object], str]] = {}

    def digests(self) -> dict[str, str]:
        """Returns the digest of each loaded module, by its name."""
        packages = tuple(f"{package.replace('/', '.')}." for package in TRACED)
        with self._lock:
            return {
                name: self._digest(name, module)
                for name, module in list(sys.modules.items())
                if name.startswith(packages) or name.rpartition(".")[0] == "jdisagg"
            }

    def _digest(self, name: str, module: types.ModuleType) -> str:
        values = list(_values(module))
        before, found = self._seen.get(name, ([], ""))
        if len(before) != len(values) or not all(map(operator.is_, before, values)):
            found = _hashed(_Reading(name).members(vars(module)))
            self._seen[name] = values, found
        return found


def _values(module: types.ModuleType) -> Iterator[object]:
    """Yields the values of a module, the members of its own classes, and the items of its
    containers."""
    for value in vars(module).values():
        yield value
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                yield from vars(value).values()
        elif isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, (list, set)):
            yield from value


def _hashed(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Reading:
    """Describes the values of one module by texts. Each class and function is read once."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._read: set[int] = set()

    def members(self, members: Mapping[str, object]) -> Iterator[str]:
        for name, value in sorted(members.items()):
            if name not in _IGNORED:
                yield name
                yield from self._value(value)

    def _value(self, value: Any) -> Iterator[str]:
        if isinstance(value, (type, types.FunctionType)):
            yield f"{value.__module__}.{value.__qualname__}"
            if id(value) not in self._read:
                self._read.add(id(value))
                yield from self._definition(value)
        elif isinstance(value, (staticmethod, classmethod)):
            yield from self._value(value.__func__)
        elif isinstance(value, property):
            yield from self._value(value.fget)
            yield from self._value(value.fset)
        elif isinstance(value, functools.cached_property):
            yield from self._value(value.func)
        elif callable(value) and (inner := inspect.unwrap(value)) is not value:
            yield type(
                value
            ).__qualname__  # such as a function under `jax.jit` or `functools.cache`
            yield from self._value(inner)
        else:
            yield _text_of(value)

    def _definition(self, value: type | types.FunctionType) -> Iterator[str]:
        """Yields the code of a function, or the members of a class of this module. Names suffice
        for classes of other modules, which are read there."""
        if isinstance(value, types.FunctionType):
            yield from _code_texts(value.__code__)
            yield _text_of((value.__defaults__, value.__kwdefaults__))
            for cell in value.__closure__ or ():
                yield from self._value(_content(cell))
        elif value.__module__ == self._module:
            yield from self.members(vars(value))


def _code_texts(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_texts(constant)
        else:
            yield _text_of(constant)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the function refers to itself and is not defined yet
        return None


def _text_of(value: object) -> str:
    """Returns the digest of a value. For other values, returns the type's name."""
    try:
        return digest(value)
    except (IndigestibleError, AttributeError, RecursionError):
        return f"{type(value).__module__}.{type(value).__qualname__}"


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of modules that differ between two results of `LoadedCode.digests`. Modules
    that only one of them contains do not differ."""
    return sorted(name for name, code in now.items() if then.get(name, code) != code)
