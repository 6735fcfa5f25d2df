"""What an object does is settled when it is made: in `worker` and `scheduler` nobody gives another
object a function afterwards, nor writes through an object into one that this object holds.

1. `other.attribute = f` is an error where `f` is a function: a lambda, a partial, a method, or a
function of the same module. Functions come through the constructor or through a method.
2. `a.b.attribute = value` is an error, unless the class makes `self.b` itself. Elements of
containers (`self.b[key].attribute`) are records of their owner.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.import_graph import ROOT

ROOMS = ("worker", "scheduler")


def parsed() -> dict[Path, ast.Module]:
    package = ROOT / "jdisagg"
    files = [path for room in ROOMS for path in (package / room).glob("*.py")]
    return {path.relative_to(package): ast.parse(path.read_text()) for path in files}


def methods(trees: dict[Path, ast.Module]) -> set[str]:
    return {
        one.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.decorator_list
    }


def assigned(tree: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    """Yields each attribute that is set, with the value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for one, value in pairs:
                if isinstance(one, ast.Attribute) and value is not None:
                    yield one, value


def made(tree: ast.Module) -> set[str]:
    """Returns the attributes that a class of the module sets to an object that it makes."""
    return {
        ast.unparse(target)
        for target, value in assigned(tree)
        if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1][:1].isupper()
    }


def is_function(value: ast.expr, named: set[str], here: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).endswith("partial")
    if isinstance(value, ast.Attribute):
        return value.attr in named and ast.unparse(value).startswith("self.")
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in here)


def broken(path: Path, tree: ast.Module, named: set[str]) -> Iterator[str]:
    here = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    own = made(tree)
    for target, value in assigned(tree):
        holder, function = target.value, is_function(value, named, here)
        if isinstance(holder, ast.Attribute) and not target.attr.startswith("__"):
            held = isinstance(holder.value, ast.Name | ast.Attribute)
            if held and (function or ast.unparse(holder) not in own):
                yield f"{path.as_posix()}: {ast.unparse(target)}"
        elif isinstance(holder, ast.Name) and holder.id not in ("self", "cls") and function:
            yield f"{path.as_posix()}: {ast.unparse(target)}"


def test_no_object_is_wired_after_it_is_made() -> None:
    trees = parsed()
    named = methods(trees)
    assert not {one for path, tree in trees.items() for one in broken(path, tree, named)}


def test_the_rule_sees_what_it_forbids() -> None:
    text = """
def plain(): ...
class One:
    def __init__(self, other):
        self.other = other
        self.made = Record()
        self.hook = lambda: None
    def act(self, other):
        self.made.count = 1
        self.found[1].count = 2
        other.count = 3
        self.other.count = 4
        self.made.hook = self.act
        other.hook = lambda: None
        other.plain = plain
        other.act, other.count = self.act, 1
        other.part = functools.partial(plain)
"""
    tree = ast.parse(text)
    path = Path("here.py")
    found = [one.removeprefix("here.py: ") for one in broken(path, tree, {"act"})]
    assert found == [
        "self.other.count",
        "self.made.hook",
        "other.hook",
        "other.plain",
        "other.act",
        "other.part",
    ]
