"""Recipes are read, written and read back; and what a recipe says reaches every process of a cluster."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, InstanceConfig, LimitsConfig, Mode, ModelConfig, RoutingConfig, override
from jdisagg.engine.instance import WorkerConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from launch.cluster_plan import ClusterPlan, plan_instances
from launch.recipes import ClusterShape, load_recipe, load_shape, recipe_text, router_flags, worker_flags

ROOT = Path(__file__).resolve().parents[2]
IMPORT = "from jdisagg.config import EngineConfig, InstanceConfig"
TWO = EngineConfig(
    model=ModelConfig("models/some", "bfloat16", 8192),
    prefill=InstanceConfig(layout=Layout(tp=4, ep=4), page_size=64, chunk_tokens=4096, min_chunk_tokens=1024, pages_per_rank=700),
    decode=InstanceConfig(
        layout=Layout(dp=4, ep=4), page_size=32, slots_per_rank=96, chunk_tokens=4096, growth_tokens=512, codec="int8", hardware="h100"
    ),
)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_read(path: Path):
    config = load_recipe(str(path))
    shape = load_shape(str(path))
    assert shape == (ClusterShape(1, 1) if config.mode is Mode.DISAGGREGATED else ClusterShape(mixed=1))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (TWO, ClusterShape(3, 2)),
        (EngineConfig(mode=Mode.CHUNKED, decode=InstanceConfig(layout=Layout(tp=2), chunk_tokens=1024)), ClusterShape(mixed=4)),
        (EngineConfig(mode=Mode.UNIFIED), ClusterShape(mixed=1)),
    ],
)
def test_what_is_written_is_what_is_read(config: EngineConfig, shape: ClusterShape, tmp_path: Path):
    path = tmp_path / "recipe.py"
    path.write_text(recipe_text(config, shape, "A recipe."))
    assert load_recipe(str(path)) == config
    assert load_shape(str(path)) == shape


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_workers_flags_make_it_what_the_recipe_says(role: str):
    config = replace(TWO, limits=LimitsConfig(pull_seconds=2.0))
    wanted = config.prefill if role == "prefill" else config.decode
    given = dict(flag.split("=", 1) for flag in worker_flags(config, role) if not flag.startswith("--set="))
    # As launch.worker puts them together.
    made = WorkerConfig(
        model=ModelConfig(given["--model"], given["--dtype"]),
        instance=InstanceConfig(
            layout=wanted.layout,
            page_size=int(given["--page_size"]),
            slots_per_rank=int(given["--slots"]),
            chunk_tokens=int(given["--prefill_chunk"]),
            codec=given["--codec"],
            hardware=given["--hardware"],
        ),
    )
    made = override(made, [flag.removeprefix("--set=") for flag in worker_flags(config, role) if flag.startswith("--set=")])
    assert (made.model, made.instance, made.limits) == (config.model, wanted, config.limits)


def test_a_routers_flags_are_what_the_recipe_changes_of_limits_and_routing():
    assert router_flags(EngineConfig()) == ()
    config = replace(TWO, limits=LimitsConfig(max_attempts=4), routing=RoutingConfig(ttft_slo_seconds=2.0, tenant_weights="a=2"))
    assert router_flags(config) == (
        "--model=models/some",
        "--set=limits.max_attempts=4",
        "--set=routing.ttft_slo_seconds=2.0",
        "--set=routing.tenant_weights=a=2",
    )


def test_flags_of_a_role_come_before_those_of_all_so_that_the_latter_win():
    instances = (*plan_instances("prefill", 1, "tp=4", 1, "127.0.0.1"), *plan_instances("decode", 1, "dp=4", 1, "127.0.0.1"))
    roles = {role: worker_flags(TWO, role) for role in ("prefill", "decode")}
    plan = ClusterPlan("127.0.0.1", 8700, instances, ("--page_size=16",), (), role_flags=roles)
    for spec, size in zip(plan.workers(), ("64", "32"), strict=True):
        sizes = [flag for command in spec.commands() for flag in command.arguments if flag.startswith("--page_size=")]
        assert sizes == [f"--page_size={size}", "--page_size=16"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a Python file"),
        ("x = 1", "has no get_config"),
        ("def get_config(): return 3", "has no get_config"),
        ("x = 1\ndef get_config(:", r"recipe.py', line 2: SyntaxError: invalid syntax .*; correct the recipe"),
        ("\n\nfrom jdisagg.nothing import x", r"recipe.py', line 3: ModuleNotFoundError: No module named 'jdisagg.nothing'; correct"),
        (f"{IMPORT}\ndef get_config():\n    return EngineConfig(foo=1)", r"line 3: TypeError: .*unexpected keyword argument 'foo'"),
        (f"{IMPORT}\nONE = InstanceConfig(page_size=0)", r"recipe.py', line 2: page_size must be positive, got 0"),
        ("open('/nowhere/at/all')", r"line 1: FileNotFoundError: .*'/nowhere/at/all'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str | None, said: str, tmp_path: Path):
    path = tmp_path / "recipe.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_recipe(str(path))


def test_a_shape_that_serves_nobody_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="one prefill and one decode instance at least"):
        ClusterShape(prefill=2)
    path = tmp_path / "recipe.py"
    path.write_text("def get_cluster(): return (1, 2)")
    with pytest.raises(ConfigError, match="must return a ClusterShape, got tuple"):
        load_shape(str(path))
