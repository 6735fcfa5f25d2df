"""Computes digests of values and of loaded code that are equal in every process. They name compiled
programs in the program store (`program_store.py`).

`digest` covers the values from which programs are made: configurations, shapes, the structure of
Flax modules, functions by name. `LoadedCode` covers the code that tracing may run, as it is in this
process, including functions, classes and constants that were replaced at run time."""

import contextlib
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
# Packages whose code runs while a program is traced, or whose values become a part of the program.
# Modules directly in `jdisagg` belong to these packages, too.
TRACED = (
    "jdisagg/costs",
    "jdisagg/engine/research",
    "jdisagg/executor",
    "jdisagg/grammar",
    "jdisagg/layout",
    "jdisagg/messages",
    "jdisagg/ops",
    "jdisagg/scheduler",
    "jdisagg/transfer",
    "models",
)
_PREFIXES = tuple(f"{package.replace('/', '.')}." for package in TRACED)
# Types and functions of these packages are represented by their module and name. The versions or
# sources of the packages are a part of a program's name.
KNOWN = ("builtins", "flax", "jax", "jaxlib", "jdisagg", "ml_dtypes", "models", "numpy")
_IGNORED = {
    *("__annotations__", "__annotate__", "__builtins__", "__cached__", "__doc__", "__dict__"),
    *("__file__", "__firstlineno__", "__loader__", "__path__", "__spec__", "__weakref__"),
    *("__slotnames__", "__static_attributes__", "_abc_impl"),
}


class IndigestibleError(Exception):
    """Raised for a value that has no digest that is equal in every process."""


def digest(*values: object) -> str:
    """Returns a hash of values. Every process computes the same hash for equal values.

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
    elif isinstance(value, type):
        yield _name(value)
    elif isinstance(getattr(value, "digest", None), str):
        yield value.digest
    elif isinstance(value, jax.Device):
        yield f"device:{value.platform}:{value.id}:{value.device_kind}"
    elif isinstance(value, np.dtype):
        yield f"dtype:{value.str}:{value.name}"
    elif isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            raise IndigestibleError("an array of objects")
        content = hashlib.sha256(value.tobytes()).hexdigest()
        yield f"array:{value.dtype.str}:{value.dtype.name}:{value.shape}:{content}"
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
    elif isinstance(value, functools.partial):
        yield from _parts(("partial", value.func, value.args, value.keywords))
    elif callable(value) and hasattr(value, "__qualname__"):
        name, module = _name(value), sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            module = getattr(module, part, None)
        if module is not value:  # a method of an object, or a wrapper
            raise IndigestibleError(f"another function than {name}")
        yield name
    elif dataclasses.is_dataclass(value):
        yield _name(kind)
        for field in dataclasses.fields(value):
            yield field.name
            yield from _parts(getattr(value, field.name))
    else:
        raise IndigestibleError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def is_traced(module: str) -> bool:
    """Returns whether a module belongs to the `TRACED` packages."""
    return f"{module}.".startswith(_PREFIXES) or module.rpartition(".")[0] == "jdisagg"


def _name(value: Any) -> str:
    """Returns the full name of a type or function. Raises IndigestibleError if the name does not
    identify the value."""
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
    for path in sorted(path for path in files if path.is_file()):
        text.update(str(path.relative_to(ROOT)).encode())
        text.update(path.read_bytes())
    return text.hexdigest()


class ReplacedError(Exception):
    """Raised if a module holds code that is not part of an installed package."""


class LoadedCode:
    """Digests of the loaded modules of the `TRACED` packages. Thread-safe. A module is read again
    only when one of its values was replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[list[object], str]] = {}

    def digests(self) -> dict[str, str]:
        """Returns the digest of each loaded module, by its name.

        Raises:
            ReplacedError: A module holds a function, class or object that was defined elsewhere,
                such as in a notebook or a test. A digest cannot cover all that its result may
                depend on.
        """
        with self._lock:
            return {
                name: self._digest(name, module)
                for name, module in list(sys.modules.items())
                if is_traced(name)
            }

    def _digest(self, name: str, module: types.ModuleType) -> str:
        values = list(_values(module))
        before, found = self._seen.get(name, ([], ""))
        if len(before) != len(values) or not all(map(operator.is_, before, values)):
            self._seen.pop(name, None)
            found = _hashed(_Reading(name).members(_members(module)))
            self._seen[name] = values, found
        return found


def _members(module: types.ModuleType) -> dict[str, object]:
    """Returns the values of a module, without its submodules, which appear when they are
    imported."""
    within = f"{module.__name__}."
    return {
        name: value
        for name, value in vars(module).copy().items()
        if not (isinstance(value, types.ModuleType) and value.__name__.startswith(within))
    }


def _values(module: types.ModuleType) -> Iterator[object]:
    """Yields the values of a module, the members of its own classes, the items of its containers,
    and the code of its functions."""
    for value in _members(module).values():
        yield value
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                for member in list(vars(value).values()):
                    yield member
                    yield getattr(member, "__code__", None)
        elif isinstance(value, types.FunctionType):
            yield value.__code__
        elif isinstance(value, dict):
            yield from list(value)
            yield from list(value.values())
        elif isinstance(value, (list, set)):
            yield from list(value)


def _hashed(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Reading:
    """Describes the values of one module by texts, which enter the module's digest. Each object is
    read once. Raises ReplacedError for an object that does not belong to an installed package."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._read: dict[int, object] = {}  # holds the objects, so that ids stay theirs

    def members(self, members: Mapping[str, object]) -> Iterator[str]:
        for name, value in sorted(members.items()):
            if name not in _IGNORED:
                yield name
                yield from self._value(value)

    def _value(self, value: Any) -> Iterator[str]:
        if isinstance(value, (type, types.FunctionType)):
            yield _installed(value)
            if self._first(value):
                yield from self._definition(value)
        elif isinstance(value, types.ModuleType):
            yield f"module:{value.__name__}:{getattr(value, '__file__', '')!r}"
        elif isinstance(value, (staticmethod, classmethod)):
            yield from self._value(value.__func__)
        elif isinstance(value, property):
            yield from self._value(value.fget)
            yield from self._value(value.fset)
        elif isinstance(value, functools.cached_property):
            yield from self._value(value.func)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                yield from self._value(part)
        elif callable(value) and (inner := inspect.unwrap(value)) is not value:
            # A wrapped function, for example by `jax.jit` or `functools.cache`.
            yield type(value).__qualname__
            yield from self._value(inner)
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        yield _installed(type(value))
        try:
            if isinstance(value, jax.Array):  # a constant; its shape and values count
                value = np.asarray(value)
            yield digest(value)
            return
        except (IndigestibleError, AttributeError, RecursionError):
            pass
        if not self._first(value):
            return
        if isinstance(value, Mapping):
            for item in list(value.items()):
                yield from self._value(item)
        elif isinstance(value, (tuple, list)):
            for item in list(value):
                yield from self._value(item)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(_hashed(self._value(item)) for item in list(value))
        else:  # objects that hold locks and the like are not constants
            with contextlib.suppress(IndigestibleError, AttributeError, RecursionError):
                yield digest(vars(value) if hasattr(value, "__dict__") else ())

    def _first(self, value: object) -> bool:
        if id(value) in self._read:
            return False
        self._read[id(value)] = value
        return True

    def _definition(self, value: type | types.FunctionType) -> Iterator[str]:
        """Yields the code of a function, or the members of a class of this module. For classes of
        other modules yields only the name, because the digests of those modules cover them."""
        if isinstance(value, types.FunctionType):
            yield from self._code(value.__code__)
            yield from self._value((value.__defaults__, value.__kwdefaults__))
            for cell in value.__closure__ or ():
                yield from self._value(_content(cell))
        elif value.__module__ == self._module:
            yield from self.members(dict(vars(value)))

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield from self._value(constant)


def _installed(value: type | types.FunctionType) -> str:
    """Returns the full name of a class or function of this project, of an installed package or of
    Python. Raises ReplacedError for others."""
    module = value.__module__ or ""
    if module.startswith("unittest.mock") or not _is_installed(module.partition(".")[0]):
        raise ReplacedError(f"{module}.{value.__qualname__}")
    return f"{module}.{value.__qualname__}"


@functools.cache
def _is_installed(root: str) -> bool:
    if root in KNOWN or root in sys.stdlib_module_names and root != "__main__":
        return True
    if root.startswith("namedtuple_"):  # methods that Python makes
        return True
    module = sys.modules.get(root)
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    # The folder of an installed package is next to the metadata that pip writes.
    return bool(places[0]) and any(Path(places[0]).parent.glob("*.dist-info"))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the function refers to itself and is not defined yet
        return None


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of modules that differ between two results of `LoadedCode.digests`. Modules
    that only one of them contains do not differ."""
    return sorted(name for name, code in now.items() if then.get(name, code) != code)
