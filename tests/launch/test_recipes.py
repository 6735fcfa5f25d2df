"""Recipes are read, written and read back; and what a recipe says reaches every process of a
cluster."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from jdisagg.config import (
    EngineConfig,
    InstanceConfig,
    LimitsConfig,
    Mode,
    ModelConfig,
    PrefixConfig,
)
from jdisagg.engine.limits import worker_config
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.recipes import ClusterShape, load_recipe, load_shape, recipe_text
from launch import check_config, cluster, serve, worker
from launch.flags import Given
from launch.settings import engine_config
from tests.launch.two_meshes import TWO

ROOT = Path(__file__).resolve().parents[2]
IMPORT = "from jdisagg.config import EngineConfig, InstanceConfig"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("[a-z]*.py")), ids=lambda path: path.stem
)
def test_every_shipped_recipe_is_read(path: Path):
    config = load_recipe(str(path))
    shape = load_shape(str(path))
    assert shape == (
        ClusterShape(1, 1) if config.mode is Mode.DISAGGREGATED else ClusterShape(mixed=1)
    )


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (TWO, ClusterShape(3, 2)),
        (
            EngineConfig(
                mode=Mode.CHUNKED, decode=InstanceConfig(layout=Layout(tp=2), chunk_tokens=1024)
            ),
            ClusterShape(mixed=4),
        ),
        (EngineConfig(mode=Mode.UNIFIED), ClusterShape(mixed=1)),
    ],
)
def test_what_is_written_is_what_is_read(config: EngineConfig, shape: ClusterShape, tmp_path: Path):
    path = tmp_path / "recipe.py"
    path.write_text(recipe_text(config, shape, "A recipe."))
    assert load_recipe(str(path)) == config
    assert load_shape(str(path)) == shape


FIELDS = {
    "mode": "disaggregated",
    "model": {"directory": "models/some", "dtype": "bfloat16", "context_tokens": 8192},
    "instance": {"hardware": "h100", "page_size": 32},
    "prefill": {"layout": {"tp": 4, "ep": 4}},
    "decode": {"layout": "dp=4,ep=4", "codec": "int8", "speculate": False},  # YAML's off
    "prefix": {"reuse": False, "host_gib": None},
    "cluster": {"prefill": 3, "decode": 2},
}


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.json"])
def test_yaml_and_json_hold_the_fields_that_differ(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(json.dumps(FIELDS) if name.endswith("json") else yaml.safe_dump(FIELDS))
    both = InstanceConfig(hardware="h100", page_size=32)
    assert load_recipe(str(path)) == EngineConfig(
        model=ModelConfig("models/some", "bfloat16", 8192),
        prefill=replace(both, layout=Layout(tp=4, ep=4)),
        decode=replace(both, layout=Layout(dp=4, ep=4), codec="int8", speculate="off"),
        prefix=PrefixConfig(reuse=False, host_gib=None),
    )
    assert load_shape(str(path)) == ClusterShape(3, 2)
    for empty in ("{}", '{"service": {"served_model_name": null, "token_file": null}}'):
        path.write_text(empty)
        assert load_recipe(str(path)) == EngineConfig()
    path.write_text("{}")
    assert load_shape(str(path)) == ClusterShape(1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "must hold the fields of a configuration"),
        ("a: [", "is not valid YAML: "),
        ("decode: {slots: 3}", r"recipe.yaml', line 1: decode.slots is not a setting"),
        ("decode: {page_size: x}", "decode.page_size must be a whole number, got 'x'"),
        ("decode: 3", "decode is a section, not a value, got 3"),
        (
            "mode: chunked\ninstance:\n  page_size: 0",
            "line 3: prefill.page_size must be positive, got 0",
        ),
        ('{\n\t"prefix": {\n\t\t"disk_gib": -1}}', "line 3: prefix.disk_gib must not be negative"),
        ("mode: unified\ndecode:\n  page_size: 8\ndecode: {}", "line 4: decode is set twice; keep"),
        ('{"decode": {"page_size": 8, "page_size": 4}}', "line 1: decode.page_size is set twice"),
        ("model: {dtype: }", "model.dtype must be one of float32, bfloat16, got ''"),
        ("\nprefix: {disk_gib: 1}", "line 2: prefix.disk_gib=1.0 needs disk_dir"),
        ("cluster: {router: 1}", "cluster: {'router': 1} must hold numbers for some of prefill, "),
    ],
)
def test_fields_that_do_not_exist_are_named_with_the_file(text: str, said: str, tmp_path: Path):
    path = tmp_path / f"recipe.{'json' if text.startswith('{') else 'yaml'}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_recipe(str(path))
        load_shape(str(path))


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
def test_a_worker_is_what_the_recipe_says_and_cuts_layers_as_the_prefill_side_does(
    role: WorkerRole,
):
    limits = LimitsConfig(max_attempts=4)
    cut = replace(TWO, limits=limits, prefill=replace(TWO.prefill, layer_groups=3, block_bytes=0))
    wanted = cut.prefill if role is WorkerRole.PREFILL else cut.decode
    made = worker_config(cut, role)
    assert made.instance == replace(wanted, layer_groups=3, block_bytes=0)
    assert (made.model, made.limits, made.warm_up) == (cut.model, limits, cut.warm_up)


@pytest.mark.parametrize(("stages", "drafts"), [(1, "auto"), (2, "ngram")])
def test_both_sides_draft_alike_if_one_has_pipeline_stages(stages: int, drafts: str):
    """A layer that drafts is part of the KV of both sides, and stages have none."""
    both = [replace(side, speculate="auto") for side in (TWO.prefill, TWO.decode)]
    cluster = replace(
        TWO, prefill=both[0], decode=replace(both[1], layout=replace(both[1].layout, pp=stages))
    )
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        assert worker_config(cluster, role).instance.speculate == drafts


def test_a_mixed_worker_of_a_recipe_of_two_meshes_takes_chunks_between_steps():
    assert worker_config(TWO, WorkerRole.MIXED).mode is Mode.CHUNKED
    one = replace(TWO, mode=Mode.UNIFIED)
    assert worker_config(one, WorkerRole.MIXED).mode is Mode.UNIFIED


NO_RECIPES: list[tuple[str | None, str]] = [
    (None, "is not a Python, YAML or JSON file"),
    ("x = 1", "has no get_config"),
    ("def get_config(): return 3", "has no get_config"),
    ("x = 1\ndef get_config(:", r"recipe.py', line 2: SyntaxError: .*; correct the recipe"),
    (
        "\n\nfrom jdisagg.nothing import x",
        r"recipe.py', line 3: ModuleNotFoundError: No module named 'jdisagg.nothing'; correct",
    ),
    (
        f"{IMPORT}\ndef get_config():\n    return EngineConfig(foo=1)",
        r"line 3: TypeError: .*unexpected keyword argument 'foo'",
    ),
    (
        f"{IMPORT}\nONE = InstanceConfig(page_size=0)",
        r"recipe.py', line 2: instance.page_size must be positive, got 0",
    ),
    ("open('/nowhere/at/all')", r"line 1: FileNotFoundError: .*'/nowhere/at/all'"),
]


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path):
    path = tmp_path / "recipe.py"
    for text, said in NO_RECIPES:
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


@pytest.mark.parametrize(
    ("visible", "flags", "layouts"),
    [
        ("", (), (Mode.DISAGGREGATED, "tp=2", "dp=2")),  # virtual devices of the CPU
        ("0", (), (Mode.CHUNKED, "", "")),
        ("0", ("--mode=unified",), (Mode.UNIFIED, "", "")),
        ("0,1", (), (Mode.DISAGGREGATED, "", "")),
        ("0,1,2,3,4,5,6,7", (), (Mode.DISAGGREGATED, "tp=4", "dp=4")),
        ("0,1,2", ("--prefill=tp=2",), (Mode.DISAGGREGATED, "tp=2", "dp=2")),
    ],
)
@pytest.mark.parametrize("command", [serve, check_config])
def test_a_process_without_layouts_uses_the_gpus_of_its_host(
    command: ModuleType,
    visible: str,
    flags: tuple[str, ...],
    layouts: tuple[Mode, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    given = Given(command.flags.names, ())
    given.values(["jdisagg", *flags])
    config = engine_config(given)
    mode, prefill, decode = layouts
    assert (config.mode, config.prefill.layout, config.decode.layout) == (
        mode,
        Layout.parse(prefill) if prefill else Layout(),
        Layout.parse(decode) if decode else Layout(),
    )


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (("--role=prefill",), "tp=8"),
        (("--role=decode",), "dp=8"),
        (("--role=mixed", "--mode=unified"), "dp=8"),
        (("--role=prefill", "--gpus=2,3,6"), "tp=2"),
        (("--role=prefill", "--layout=dp=2"), "dp=2"),
        (("--role=prefill", "--num_processes=2"), "tp=2"),  # the default recipe's
    ],
)
def test_a_worker_without_a_layout_uses_all_gpus_of_its_host(
    flags: tuple[str, ...], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    given = Given(worker.flags.names, ())
    given.values(["jdisagg", "--router=localhost:8700", *flags])
    monkeypatch.setattr(worker, "flags", given)
    assert worker._of_flags().worker.instance.layout == Layout.parse(layout)


@pytest.mark.parametrize(
    ("visible", "flags", "layouts", "instances"),
    [
        ("", (), ("tp=2", "dp=2"), 2),  # virtual devices of the CPU
        ("0", (), ("", ""), 2),
        ("0", ("--gpus=0,0",), ("", ""), 2),
        ("0,1,2,3,4,5,6,7", (), ("tp=4", "dp=4"), 2),
        ("0,1,2,3,4,5,6,7", ("--decode_workers=2",), ("tp=2", "dp=2"), 3),
        ("0,1,2,3,4,5,6,7", ("--mode=chunked",), ("tp=8", "dp=8"), 1),
        ("0,1,2,3,4,5,6,7", ("--mixed_workers=2",), ("tp=4", "dp=4"), 2),
        ("0,1,2,3,4,5,6,7", ("--gpus_per_worker=2",), ("tp=2", "dp=2"), 2),
        ("0,1,2,3", ("--on=ray",), ("tp=2", "dp=2"), 2),
    ],
)
def test_the_workers_of_a_cluster_without_layouts_share_the_gpus_of_the_host(
    visible: str,
    flags: tuple[str, ...],
    layouts: tuple[str, str],
    instances: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    given = Given(cluster.flags.names, ())
    given.values(["jdisagg", *flags])
    monkeypatch.setattr(cluster, "flags", given)
    config = cluster.cluster_config()
    found = (config.engine.prefill.layout, config.engine.decode.layout)
    assert found == tuple(Layout.parse(text) if text else Layout() for text in layouts)
    assert config.shape.instances == instances and config.engine.mode.value == (
        given.mode or "disaggregated"
    )
