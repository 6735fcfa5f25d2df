"""What `launch.cluster` makes of a recipe and of the flags that win over it, as command lines: no process is started here."""

import pickle
import subprocess
import sys
from pathlib import Path

from jdisagg.config import EngineConfig, InstanceConfig, ServiceConfig
from jdisagg.layout.axes import Layout
from launch.cluster_plan import ClusterPlan
from launch.recipes import ClusterShape, worker_flags
from tests.launch.script_ends import ends

ROOT = Path(__file__).parents[2]
SHAPE = ClusterShape(prefill=2, decode=1)
# In a process of its own: scripts define flags of the same names, and a process holds those of one.
ASK = """
import pickle, sys
from absl import flags
from launch import cluster
flags.FLAGS(["cluster", *sys.argv[1:]])
recipe, shape = pickle.load(sys.stdin.buffer)
pickle.dump(cluster._plan(cluster._service(recipe), recipe, shape), sys.stdout.buffer)
"""


def planned(recipe: EngineConfig, shape: ClusterShape = SHAPE, *given: str) -> ClusterPlan:
    asked = subprocess.run(
        (sys.executable, "-c", ASK, *given), input=pickle.dumps((recipe, shape)), stdout=subprocess.PIPE, cwd=ROOT, check=True, timeout=60
    )
    return pickle.loads(asked.stdout)


def commands(plan: ClusterPlan) -> list[tuple[str, ...]]:
    return [command.arguments for spec in (*plan.routers(), *plan.workers()) for command in spec.commands()]


def test_who_is_let_in_where_and_for_how_long_is_as_the_recipe_says(tmp_path: Path) -> None:
    names = ("tls_certificate", "tls_key", "token_file", "cluster_token_file")
    files = {name: str(tmp_path / name) for name in names}
    for name, path in files.items():
        Path(path).write_text(f"-----BEGIN {'PRIVATE KEY' if name == 'tls_key' else 'CERTIFICATE'}-----\n")
    recipe = EngineConfig(service=ServiceConfig("localhost", 8801, drain_seconds=7.0, **files))
    plan = planned(recipe)
    assert plan.address == "localhost:8801"
    for arguments in commands(plan):
        path = "--set=service." if "launch.worker" in arguments else "--"
        assert {"--host=localhost", "--drain_seconds=7.0", *(f"{path}{name}={file}" for name, file in files.items())} <= set(arguments)
    other = planned(recipe, SHAPE, "--port=8802", "--token_file=")
    assert other.address == "localhost:8802"
    assert not any("token_file=" in text.replace("cluster_token", "") for arguments in commands(other) for text in arguments)


def test_mixed_instances_come_instead_of_a_recipes_two_kinds() -> None:
    recipe = EngineConfig(decode=InstanceConfig(layout=Layout(tp=2)))
    assert [(instance.name, instance.layout) for instance in planned(recipe, SHAPE, "--mixed=1").instances] == [("mixed-0", Layout(tp=2))]
    assert not any("mode=" in flag for flag in worker_flags(recipe, "mixed")), "a worker does not take a mode of two meshes"


def test_mixed_instances_stand_beside_the_other_two_kinds_in_a_recipe_alone() -> None:
    instances = planned(EngineConfig(), ClusterShape(prefill=1, decode=1, mixed=1)).instances
    assert [instance.name for instance in instances] == ["prefill-0", "decode-0", "mixed-0"]
    given = [instance.name for instance in planned(EngineConfig(), SHAPE, "--mixed=2", "--prefill=0", "--decode=0").instances]
    assert given == ["mixed-0", "mixed-1"]


def test_flags_that_contradict_each_other_or_the_clock_are_refused() -> None:
    joined = ("--mixed=1", "--prefill=2")
    ill, once, canary = ends("cluster", joined, ("--mixed=1", "--decode=1", "--prefill=2"), ("--canary_seconds=-1",))
    assert (ill.status, ill.out) == (once.status, once.out) == (1, "")
    assert ill.err.startswith("error: --mixed=1 and --prefill=2: mixed instances come instead of the two other kinds; ")
    assert once.err.startswith("error: --mixed=1 and --prefill=2 --decode=1: ") and once.err.count("\n") == 1
    for end in (canary, *ends("router", ("--canary_seconds=-1",))):
        assert end.status == 1 and "--canary_seconds=-1: -1.0 is not a non-negative number" in end.err


def test_the_size_of_messages_is_the_recipes_for_every_process_and_a_flags_before_it() -> None:
    recipe = EngineConfig(service=ServiceConfig(max_message_bytes=64 << 20))
    assert all("--set=service.max_message_bytes=67108864" in arguments for arguments in commands(planned(recipe)))
    plan = planned(EngineConfig(), SHAPE, "--set=service.max_message_bytes=1048576")
    assert all("--set=service.max_message_bytes=1048576" in arguments for arguments in commands(plan))
