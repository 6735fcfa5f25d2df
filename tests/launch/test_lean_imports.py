"""The router, the supervisor of a cluster and what computes or asks from outside are light
processes: they never load JAX."""

from tests.launch.script_ends import ended

LIGHT = ("router", "cluster", "ask", "replay_trace", "plan", "kv_calculator", "guide")
PROGRAM = """
import importlib, sys
import jdisagg.client
print("client", [name for name in sys.modules if name.startswith("jdisagg.router.")])
for page in sys.argv[1:]:
    importlib.import_module(f"launch.{page}")
    print(page, [name for name in ("jax", "jaxlib", "flax", "orbax") if name in sys.modules])
"""


def test_a_script_without_a_mesh_does_not_load_jax() -> None:
    done = ended("-c", PROGRAM, *LIGHT)
    assert done.out.splitlines() == [f"{page} []" for page in ("client", *LIGHT)], done.err
