"""What `launch.cluster` makes of a recipe and of the flags that win over it: no process is started
here."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, InstanceConfig, ServiceConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.cluster_plan import ClusterConfig, ClusterPlan, plan_cluster
from jdisagg.node.recipes import ClusterShape, recipe_text
from launch import cluster
from launch.flags import Given
from tests.lanes import first_quick
from tests.launch.script_ends import ends

TWO = EngineConfig(prefill=InstanceConfig(layout=Layout(tp=2)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The configuration of a command line with a recipe."""

    def of(*given: str, recipe: EngineConfig = TWO, shape: ClusterShape | None = None):
        path = tmp_path / "recipe.py"
        path.write_text(recipe_text(recipe, shape or ClusterShape(2, 1), "A recipe."))
        flags = Given(cluster.flags.names, ())
        flags.values(["cluster", f"--config={path}", *given])
        monkeypatch.setattr(cluster, "flags", flags)
        return cluster.cluster_config()

    return of


def plan(config: ClusterConfig, folder: Path) -> ClusterPlan:
    return plan_cluster(config, folder)


def test_who_is_let_in_where_and_for_how_long_is_alike_for_all_processes(
    asked, tmp_path: Path
) -> None:
    names = ("tls_certificate", "tls_key", "token_file", "cluster_token_file")
    files = {name: str(tmp_path / name) for name in names}
    given = ("--host=localhost", "--port=8801", "--drain_seconds=7")
    made = plan(asked(*given, *(f"--{name}={path}" for name, path in files.items())), tmp_path)
    wanted = ServiceConfig("localhost", 8801, http_port=8000, drain_seconds=7.0, **files).alone
    assert made.address == "localhost:8801" and made.router_config(0).router.service == wanted
    for instance in made.instances:
        for one in made.worker_configs(instance):
            service = one.worker.service
            assert [getattr(service, name) for name in (*names, "host", "drain_seconds")] == [
                *files.values(),
                "localhost",
                7.0,
            ]


def test_counts_and_layouts_are_the_recipes_and_flags_win(asked, tmp_path: Path) -> None:
    made = plan(asked(), tmp_path)
    assert [(one.name, one.layout.tp) for one in made.instances] == [
        ("prefill-0", 2),
        ("prefill-1", 2),
        ("decode-0", 1),
    ]
    other = plan(asked("--prefill_workers=1", "--decode_workers=2", "--decode=tp=4"), tmp_path)
    assert [(one.name, one.layout.tp) for one in other.instances] == [
        ("prefill-0", 2),
        ("decode-0", 4),
        ("decode-1", 4),
    ]


def test_mixed_workers_come_instead_of_a_recipes_two_kinds(asked, tmp_path: Path) -> None:
    assert [one.name for one in plan(asked("--mixed_workers=1"), tmp_path).instances] == ["mixed-0"]
    both = plan(asked(shape=ClusterShape(1, 1, 1)), tmp_path)
    assert [one.name for one in both.instances] == ["prefill-0", "decode-0", "mixed-0"]
    with pytest.raises(ConfigError, match="--mixed_workers=1 excludes"):
        asked("--mixed_workers=1", "--prefill_workers=2")


def test_what_no_process_could_work_with_is_refused_before_any_is_started(asked) -> None:
    for given, message in (
        (("--model=/nowhere",), "/nowhere"),
        (("--prefill=tp=3",), "does not divide"),
        (("--set=instance.nonsense=1",), "prefill.nonsense is not a setting"),
        (("--elastic", "--processes_per_instance=2"), "cannot change their roles"),
        (("--prefill_workers=1", "--decode_workers=0"), "one prefill and one decode instance"),
    ):
        with pytest.raises(Exception, match=message):
            asked(*given)


def test_settings_of_both_sides_reach_every_worker_and_those_of_the_router_it_alone(
    asked, tmp_path: Path
) -> None:
    texts = ("instance.growth_tokens=32", "limits.max_attempts=3", "elastic.patience_seconds=2")
    made = plan(asked(*(f"--set={text}" for text in texts), "--slots_per_rank=3"), tmp_path)
    for instance in made.instances:
        (one,) = made.worker_configs(instance)
        assert (one.worker.instance.growth_tokens, one.worker.instance.slots_per_rank) == (32, 3)
    router = made.router_config(0).router
    assert (router.limits.max_attempts, router.elastic.patience_seconds) == (3, 2.0)


def test_the_smallest_chunk_of_each_side_is_lowered_only_below_a_smaller_largest_one(asked) -> None:
    sides = (replace(TWO.prefill, min_chunk_tokens=64), replace(TWO.decode, min_chunk_tokens=256))
    recipe = replace(TWO, prefill=sides[0], decode=sides[1])
    for size, least in ((1024, (64, 256)), (128, (64, 128)), (32, (32, 32))):
        engine = asked(f"--chunk_tokens={size}", recipe=recipe).engine
        assert (engine.prefill.min_chunk_tokens, engine.decode.min_chunk_tokens) == least


def test_settings_of_roles_are_refused_where_none_change() -> None:
    (end,) = ends("serve", ("--set=elastic.patience_seconds=2",))
    assert end.status == 1 and "elastic is not a setting; " in end.err


def test_http_is_served_on_port_8000_unless_a_flag_or_a_setting_changes_it(asked) -> None:
    found = [
        asked(*given).engine.service.http_port
        for given in ((), ("--set=service.http_port=7",), ("--http_port=-1",), ("--http_port=0",))
    ]
    assert found == [8000, 7, None, 0]


def test_a_recipe_switches_http_off_unless_the_flag_is_given(asked, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("service: {http_port: null}")
    found = [
        asked(f"--config={recipe}", *given).engine.service.http_port
        for given in ((), ("--http_port=8000",))
    ]
    assert found == [None, 8000]


def test_the_routers_serve_the_name_that_a_flag_gives(asked, tmp_path: Path) -> None:
    made = plan(asked("--served_model_name=org/mine"), tmp_path)
    assert made.router_config(0).router.service.served_model_name == "org/mine"


@pytest.mark.parametrize(("command",), first_quick([("router",), ("serve",), ("cluster",)], ci=2))
def test_a_port_in_use_is_named_with_its_flag_before_anything_compiles(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        names = ("port", "http_port", "metrics_port")
        free = {"port": 0, "http_port": 0, "metrics_port": 0}
        lines = [
            tuple(f"--{one}={at}" for one, at in {**free, name: port}.items()) for name in names
        ]
        for name, end in zip(names, ends(command, *lines), strict=True):
            sentence = f"error: port {port} is in use; choose another with --{name}\n"
            assert (end.out, end.err) == ("", sentence)
