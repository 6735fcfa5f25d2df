"""One class name stands for one thing, and a constructor asks for no more than one can keep in
mind. The source is read; nothing is imported."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("jdisagg", "models", "launch", "configs", "tools")
MOST_PARAMETERS = 7


def _trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in SHIPPED
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    }


TREES = _trees()


def _classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def test_a_public_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path, node in _classes():
        if not node.name.startswith("_"):
            places[node.name].append(path)
    assert len(places) > 300
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_constructors_have_at_most_seven_parameters() -> None:
    """Beyond that some of them are one thing that has no name yet. Plain data may have more fields:
    they are given by name and do nothing."""
    counts = {
        f"{path}:{node.lineno} {node.name}": len(arguments.args) + len(arguments.kwonlyargs) - 1
        for path, node in _classes()
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        for arguments in (part.args,)
    }
    assert len(counts) > 100
    assert not {where: count for where, count in counts.items() if count > MOST_PARAMETERS}
