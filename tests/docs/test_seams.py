"""Public seams are documented: every module says what it is, every Protocol says what is asked of
who implements it."""

import ast
from functools import cache

from tests.import_graph import ROOT, trees_of


@cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = [
        path
        for package in ("jdisagg", "models", "launch", "configs")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "_pb2" not in path.name
    ]
    return [(str(path.relative_to(ROOT)), tree) for path, tree in trees_of(paths).items()]


def asked_of(protocol: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns the calls with arguments: a value without arguments may be told by its name."""
    return [
        node
        for node in protocol.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and len(node.args.args) > 1
    ]


def test_every_module_says_what_it_is() -> None:
    assert len(modules()) > 300
    assert not [path for path, tree in modules() if not ast.get_docstring(tree) and tree.body]


def test_every_protocol_says_what_it_asks_as_a_whole_or_call_by_call() -> None:
    protocols = [
        (path, node)
        for path, tree in modules()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any("Protocol" in ast.unparse(base) for base in node.bases)
    ]
    assert len(protocols) > 40
    assert not [
        (path, node.name)
        for path, node in protocols
        if not ast.get_docstring(node)
        and not all(ast.get_docstring(call) for call in asked_of(node))
    ]
