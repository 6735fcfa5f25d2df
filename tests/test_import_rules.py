"""Import rules, followed transitively through the source text without importing anything.

1. The plain and the pure rooms reach neither JAX nor gRPC. 2. `service` and `client` never reach
JAX. 3. `jdisagg` never imports `models`, `launch`, `configs`. 4. No two rooms of `jdisagg` import
each other. 5. Served or serving code never imports `tools` or `benchmarks`. 6. The commands that
serve never reach `simulator`.

`import jdisagg` imports neither JAX nor gRPC. No file is too long.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import lanes
from tests.import_graph import CLIENTS, ROOT, import_graph, module_name, product, reached

PURE = (
    *("assembly", "request", "config", "errors", "clock", "telemetry", "settings", "prompt"),
    *("layout", "grammar", "guide", "costs", "messages", "chat", "router", "scheduler"),
    *("dispatch", "worker", "supervisor", "observe", "simulator"),
)
WITHOUT_JAX = ("service", "client")
JAX = {"jax", "jaxlib", "flax", "orbax", "tensorstore", "optax"}
GRPC = {"grpc", "google", "grpc_health", "grpc_reflection"}
SERVING = ("serve", "router", "worker", "cluster")


def rooms(names: tuple[str, ...]) -> list[str]:
    return sorted(
        module
        for module in product()
        if module.startswith("jdisagg.") and module.split(".")[1] in names
    )


def room(module: str) -> str:
    """Returns the part of `jdisagg` that a module belongs to, empty for the package itself and
    other packages."""
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if package == "jdisagg" else ""


def loads(name: str, forbidden: set[str]) -> dict[str, dict[str, str]]:
    """Returns the modules of a room (or of the package itself) that load something forbidden: what,
    and by which import."""
    modules = [name] if name in product() else rooms((name,))
    found = {
        module: {top: via for top, via in reached(product(), module)[1].items() if top in forbidden}
        for module in modules
    }
    return {module: what for module, what in found.items() if what}


@pytest.mark.parametrize("name", ["jdisagg", *PURE])
def test_pure_rooms_reach_neither_jax_nor_grpc(name: str) -> None:
    assert not loads(name, JAX | GRPC)


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_the_door_and_the_client_never_reach_jax(name: str) -> None:
    assert not loads(name, JAX)


def test_the_package_never_imports_its_clients() -> None:
    for module in product():
        if module.split(".")[0] == "jdisagg":
            ours, foreign = reached(product(), module)
            outside = {name.split(".")[0] for name in ours} | set(foreign)
            assert not outside & CLIENTS, f"{module} reaches {outside & CLIENTS}"


def test_no_two_rooms_import_each_other() -> None:
    arrows = {
        (room(module), room(target))
        for module, targets in product().items()
        for target in targets
        if target in product() and room(module) and room(target)
    }
    both_ways = {(a, b) for a, b in arrows if a < b and (b, a) in arrows}
    assert not both_ways
    assert ("dispatch", "router") in arrows, "the request path asks placement"


def test_what_is_shipped_imports_nothing_that_only_makes_or_measures_it() -> None:
    outside = ("tools", "benchmarks", "tests")
    assert not {
        (module, target)
        for module, targets in product().items()
        for target in targets
        if target.split(".")[0] in outside
    }


@pytest.mark.parametrize("command", SERVING)
def test_the_commands_that_serve_never_reach_the_simulator(command: str) -> None:
    ours, _ = reached(product(), f"launch.{command}")
    simulating = ("jdisagg.simulator", "jdisagg.guide")
    assert not {module for module in ours if module.startswith(simulating)}


def test_importing_the_commands_that_serve_loads_no_simulator() -> None:
    """Also sees imports by name at run time, which the source text does not show."""
    loads = ", ".join(f"launch.{command}" for command in SERVING)
    code = f"import sys, {loads}; print([m for m in sys.modules if 'jdisagg.simulator' in m])"
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, cwd=ROOT, capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.ci
def test_tests_of_pure_folders_are_collected_without_jax() -> None:
    """Under their conftest files, as pytest collects them. The second run sees JAX, so that the
    first means something."""
    code = (
        "import sys, pytest; error = pytest.main(['--collect-only', '-p', 'no:cacheprovider',"
        " *sys.argv[1:]]); sys.exit(error or 20 + ('jax' in sys.modules))"
    )
    folders = [f"tests/{folder}" for folder in lanes.WITHOUT_JAX]
    for paths, loaded in ((folders, 20), (["tests/ops/test_rope.py"], 21)):
        run = [sys.executable, "-c", code, *paths]
        ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == loaded, ended.stdout[-2000:]


def test_no_test_module_imports_another() -> None:
    """What several share lies in modules that hold no tests, so that a test can be moved, renamed
    or removed alone."""
    importers = {
        module
        for module, targets in import_graph("tests").items()
        for target in targets
        if target.startswith("tests.")
        and any(p.startswith("test_") for p in target.split(".")[:-1])
    }
    assert not importers


def flags_defined(path: Path) -> set[str]:
    return {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("DEFINE_")
        and isinstance(node.args[0], ast.Constant)
    }


@pytest.mark.ci
def test_benchmarks_that_tests_load_define_no_flag_twice() -> None:
    """One pytest process loads all of them, and absl refuses a second definition of a flag."""
    graph = import_graph("tests", "benchmarks")
    loaded = set().union(
        *(
            reached(graph, name)[0]
            for name in graph
            if name.startswith(("tests.", "benchmarks.checks."))
        )
    )
    owners: dict[str, list[str]] = {}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if module_name(path) in loaded:
            for flag in flags_defined(path):
                owners.setdefault(flag, []).append(module_name(path))
    assert "benchmarks.public_runs" in owners["name"], "the check sees what tests load"
    assert not {flag: names for flag, names in owners.items() if len(names) > 1}


def test_the_rules_see_what_they_guard() -> None:
    assert any("jax" in targets for targets in product().values()), (
        "the executor imports jax: the graph must show it"
    )
    assert len(rooms(PURE)) > 20


def test_no_file_outgrows_eight_hundred_lines() -> None:
    """Files are split by idea. 400 lines are a smell, and 800 mean that two ideas share a file."""
    folders = ("jdisagg", "models", "launch", "configs", "tools", "tests", "benchmarks")
    written = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    ]
    assert len(written) > 100, "the generated ones alone are left out"
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in written
    }
    assert not {path: lines for path, lines in lengths.items() if lines > 800}
