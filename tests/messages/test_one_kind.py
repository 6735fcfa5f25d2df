"""Messages are structs, and only messages are: the two kinds of plain data are not mixed up.

`dataclasses.replace` of a struct, or the reverse, raises TypeError only at run time, and type
checkers miss it because msgspec's structs look like dataclasses to them. This test therefore reads
the source.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

import jdisagg.messages
from jdisagg.plain import Message
from tests.import_graph import ROOT, trees_of

FOLDERS = ("jdisagg", "models", "launch", "configs", "benchmarks", "tools")
MODULES = [
    importlib.import_module(f"jdisagg.messages.{module.name}")
    for module in pkgutil.iter_modules(jdisagg.messages.__path__)
]
MADE = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if inspect.isclass(kind) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", [kind for kind in MADE if getattr(kind, "__annotations__", None)])
def test_whatever_holds_fields_here_is_a_frozen_message(kind: type) -> None:
    assert issubclass(kind, Message), "dataclasses and messages need other functions to change them"
    assert kind.__struct_config__.frozen and kind.__struct_config__.gc is False


def _fields(node: ast.ClassDef) -> set[str]:
    return {
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _changes(tree: ast.Module) -> Iterator[tuple[ast.Call, bool]]:
    """Yields the calls that change fields of plain data, each with whether it takes a struct."""
    names = {"msgspec.structs.replace": True, "dataclasses.replace": False}
    if any(
        isinstance(line, ast.ImportFrom)
        and line.module == "dataclasses"
        and any(alias.name == "replace" for alias in line.names)
        for line in tree.body
    ):
        names["replace"] = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.keywords and _last_name(node.func) == "replace":
            name = ast.unparse(node.func)
            if name in names:
                yield node, names[name]


def _last_name(node: ast.expr) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def test_fields_are_changed_by_the_function_for_their_kind() -> None:
    """The keywords of a call must be fields of at least one class of its kind."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    words = ("replace(", "dataclass", "@plain", "Struct", "Message")
    trees = trees_of(path for path in texts if any(word in texts[path] for word in words))
    structs, others = [], []
    made = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    own = {node.name: _fields(node) for node in made}
    for node in made:
        bases = {ast.unparse(base) for base in node.bases}
        struct = bases & {"Message", "msgspec.Struct", "Struct"}
        fields = _fields(node).union(*(own.get(base, set()) for base in bases))
        (structs if struct else others).append(fields)
    seen, wrong = {True: 0, False: 0}, []
    for path, tree in trees.items():
        for call, struct in _changes(tree) if "replace(" in texts[path] else ():
            named = {keyword.arg for keyword in call.keywords if keyword.arg}
            seen[struct] += 1
            if not any(named <= fields for fields in (structs if struct else others)):
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno} changes {sorted(named)}")
    assert not wrong
    assert seen[True] > 20 and seen[False] > 20, "both kinds are changed in many places"
