"""A setting is a field of a frozen dataclass that derives from `Settings`, and is written once:

    blocks: Annotated[Count, Flag()] = 64

Its type has the bounds (`msgspec.Meta`), the choices (`OneOf`) and the flag (`Flag`). Its entry in
the `Attributes:` section is the help of the flag and the row in docs/reference. Its unit is in its
name. YAML, JSON, `--set` and flags set it through `changed`. Every value is checked when its
dataclass is made."""

import dataclasses
import difflib
import enum
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta

from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks a field that has a flag.

    Attributes:
        name: Name of the flag, in which {field} and {section} stand for the end of the path.
        shown: Commands that have the flag (`launch.flags.shown`).
    """

    name: str = "{field}"
    shown: str = "engine"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Values that a text may have. "" among them allows an empty text."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """Others that must not be off (False, 0 or empty) if the setting is on. None is not off."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AtMost:
    """Another setting that must not be less."""

    name: str


Count = Annotated[int, Meta(gt=0)]
Amount = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535, description="0 lets the system choose")]
IS_FILE = object()
File = Annotated[str, IS_FILE]  # "~" stands for the user's folder

Config = TypeVar("Config", bound="Settings")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOOLS = {"true": True, "false": False}


class SettingError(ConfigError):
    """A setting does not exist or has an impossible value. The message is `path` and `text`."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}{text}")
        self.path, self.text = path, text


class Settings:
    """Base of dataclasses of settings. `section` is the path of the fields in messages."""

    __slots__ = ()
    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        section = self.section or type(self).__name__
        for form in settings_of(type(self)):
            form.check(getattr(self, form.name), f"{section}.{form.name}")
        for form in settings_of(type(self)):
            form.relate(self, f"{section}.{form.name}")
        self._check()

    def _check(self) -> None:
        """Raises ConfigError if settings contradict each other in other ways."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the type of a field says. `kind` is its type without None and marks."""

    name: str
    kind: Any
    optional: bool
    bounds: Meta | None
    choices: tuple[str, ...]
    needs: tuple[str, ...]
    at_most: str
    flag: Flag | None
    file: bool

    @property
    def nested(self) -> bool:
        return isinstance(self.kind, type) and issubclass(self.kind, Settings)

    @property
    def values(self) -> tuple[str, ...]:
        """Texts that the setting may have, without the empty one, or () if any other."""
        if isinstance(self.kind, type) and issubclass(self.kind, enum.Enum):
            return tuple(member.value for member in self.kind)
        return tuple(filter(None, self.choices))

    def check(self, value: object, path: str) -> None:
        if value is None and self.optional or not isinstance(self.kind, type):
            return
        rule = self._broken(value)
        if rule:
            told = self.bounds and self.bounds.description
            remedy = f"; {told}" if told else ""
            raise SettingError(path, f" must {rule}, got {value!r}{remedy}")

    def relate(self, config: "Settings", path: str) -> None:
        """Checks a value beside those of other settings. Raises SettingError."""
        value = getattr(config, self.name)
        for name in self.needs:
            if value and getattr(config, name) in (False, ""):
                other = next(form for form in settings_of(type(config)) if form.name == name)
                flag = f" (--{other.flag.name.format(field=name)})" if other.flag else ""
                raise SettingError(
                    path,
                    f"={value!r} needs {name}{flag}, got {getattr(config, name)!r}; set it, or omit"
                    f" {self.name}",
                )
        if self.at_most and value > getattr(config, self.at_most):
            raise SettingError(
                path,
                f"={value:g} must not exceed {self.at_most}={getattr(config, self.at_most):g};"
                " lower the one or raise the other",
            )

    def _broken(self, value: Any) -> str:
        """Returns the rule that `value` breaks, or ""."""
        number = self.kind is float
        if not isinstance(value, (int, float) if number else self.kind):
            return f"be {self._form}"
        if number and not math.isfinite(value):
            return "be a finite number"
        if self.choices and value not in self.choices:
            return f"be {self._form}"
        rule = self.bounds
        if rule is None:
            return ""
        low = rule.gt if rule.ge is None else rule.ge
        high = rule.lt if rule.le is None else rule.le
        fits = (low is None or value > low or value == rule.ge) and (
            high is None or value < high or value == rule.le
        )
        if fits and not (rule.multiple_of and value % rule.multiple_of):
            return ""
        if rule.multiple_of:
            return f"be {'0 or ' * (rule.ge == 0)}a multiple of {rule.multiple_of}"
        if high is not None:
            return f"be in {'(['[rule.gt is None]}{low}, {high}{')]'[rule.lt is None]}"
        return "be positive" if rule.gt == 0 else "not be negative"

    @property
    def _form(self) -> str:
        if self.values:
            several = "one of " * (len(self.values) > 1)
            return f"{several}{', '.join(self.values)}{' or empty' * ('' in self.choices)}"
        return _KINDS.get(self.kind, f"a {self.kind.__name__.lower()}")

    def parsed(self, value: object, path: str) -> Any:
        """Converts a value of YAML or JSON, or a text. Raises SettingError."""
        if self.nested:
            raise SettingError(
                path,
                f" is a section, not a value, got {value!r}; set one of its settings:"
                f" {', '.join(one.name for one in settings_of(self.kind))}",
            )
        if isinstance(value, dict) and self.kind is not Layout:
            raise SettingError(path, " has no settings of its own; give one value")
        text = _text(value)
        if value is None and self.kind is str and not self.optional:
            text = ""  # a name without a value in YAML, or null
        if self.optional and text.lower() == "none":
            return None
        if self.kind is str and value is False:
            text = "off"  # YAML reads off as False
        try:
            made = self._made(text)
        except JdisaggError as error:
            raise SettingError(path, f": {error.message}") from error
        except (KeyError, ValueError):
            raise SettingError(path, f" must be {self._form}, got {text!r}") from None
        self.check(made, path)
        return made

    def _made(self, text: str) -> Any:
        if self.kind is bool:
            return _BOOLS[text.lower()]
        if self.kind is Layout:
            return Layout.parse(text)
        return str(Path(text).expanduser()) if self.file and text else self.kind(text)


@functools.cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(setting(spec.name, hints[spec.name]) for spec in dataclasses.fields(kind))


def setting(name: str, hint: Any) -> Setting:
    """Returns what the type `hint` says of the setting `name`."""
    kind, optional, marks = _marks(hint)
    by_type = {type(mark): mark for mark in reversed(marks)}
    return Setting(
        name,
        kind,
        optional,
        by_type.get(Meta),
        getattr(by_type.get(OneOf), "values", ()),
        getattr(by_type.get(Needs), "names", ()),
        getattr(by_type.get(AtMost), "name", ""),
        by_type.get(Flag),
        IS_FILE in marks,
    )


def _marks(hint: Any) -> tuple[Any, bool, list[Any]]:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        kind, optional, marks = _marks(hint.__origin__)
        return kind, optional, [*marks, *hint.__metadata__]
    if origin in (types.UnionType, typing.Union):
        given = [option for option in typing.get_args(hint) if option is not types.NoneType]
        kind, _, marks = _marks(given[0])
        return kind, len(given) < len(typing.get_args(hint)), marks
    return hint, False, []


@functools.cache
def texts_of(kind: type) -> Mapping[str, str]:
    """Returns the descriptions in the `Attributes:` or `Args:` sections of the docstrings of a
    class and its bases."""
    found: dict[str, str] = {}
    for base in kind.__bases__:
        found |= texts_of(base)
    section, indent, name = False, 0, ""
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        if re.fullmatch(r"[A-Z]\w*:", line):
            section, indent, name = line in ("Args:", "Attributes:"), 0, ""
        elif section and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            started = re.match(r"\s*(\w+):\s*(.*)", line)
            if depth == indent and started:
                name, found[started[1]] = started[1], started[2]
            elif name:
                found[name] += f" {line.strip()}"
    return found


def assignment(text: str) -> tuple[str, str]:
    """Returns path and value of the text `path.to.setting=value`. Raises SettingError."""
    path, equals, value = text.partition("=")
    if not equals:
        raise SettingError(text, " must have the form path.to.setting=value")
    return path.strip(), value.strip()


def changed(config: Config, changes: Iterable[tuple[str, object]]) -> Config:
    """Sets settings by path. Of two values for a path the later counts. Each dataclass is checked
    once, after all its settings have changed.

    Args:
        changes: Paths, such as decode.page_size, and values of YAML or JSON, or texts.

    Raises:
        SettingError: A path is of no setting, or a value is impossible.
    """
    tree: dict[str, object] = {}
    for path, value in changes:
        *sections, name = path.split(".")
        node = tree
        for part in sections:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingError(path, f": {part} is set to {inner!r} already; omit one")
            node = inner
        node[name] = value
    return _changed(config, tree, "") if tree else config


def _changed(config: Config, tree: Mapping[str, object], at: str) -> Config:
    known = {setting.name: setting for setting in settings_of(type(config))}
    values: dict[str, object] = {}
    for name, value in tree.items():
        path = f"{at}{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise SettingError(path, f" is not a setting{meant}; there are {', '.join(known)}")
        old = getattr(config, name)
        if isinstance(old, Settings) and isinstance(value, dict):
            values[name] = _changed(old, value, f"{path}.")
        else:
            values[name] = known[name].parsed(value, path)
    try:
        return dataclasses.replace(config, **values)  # pyright: ignore[reportArgumentType]
    except SettingError as error:
        raise SettingError(f"{at}{error.path.rpartition('.')[2]}", error.text) from error
    except JdisaggError as error:
        section = at.rstrip(".")
        text = error.message.removeprefix(at)
        joint = ": " if text == error.message else "."
        raise SettingError(section, f"{joint * bool(section)}{text}") from error


def _text(value: object) -> str:
    if isinstance(value, dict):  # of a layout
        return ",".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)
