"""Which processes make a cluster, as data; and what makes two copies of a model the same."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, ObserveConfig
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.limits import worker_config
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.cluster_plan import (
    ClusterConfig,
    ClusterPlan,
    InstancePlan,
    free_ports,
    plan_cluster,
    plan_instances,
)
from jdisagg.node.recipes import ClusterShape
from jdisagg.node.run_files import RouterProcessConfig, WorkerProcessConfig, read_config
from launch.shipped import SHIPPED_MODEL
from tests.set_settings import set_by

HOST = "127.0.0.1"


def config(processes: int = 1, **changes: object) -> ClusterConfig:
    engine = set_by(
        EngineConfig(), ["prefill.layout=dp=1,tp=4", "decode.layout=dp=2,tp=2", "service.port=8700"]
    )
    made = ClusterConfig(engine, ClusterShape(2, 1), SHIPPED_MODEL, processes=processes)
    return replace(made, **changes)  # type: ignore[arg-type]


def workers(plan: ClusterPlan) -> list[WorkerProcessConfig]:
    return [one for instance in plan.instances for one in plan.worker_configs(instance)]


def test_each_process_has_a_name_and_a_port_of_its_own_and_keeps_them(tmp_path: Path):
    plan = plan_cluster(config(), tmp_path)
    commands = [command for spec in plan.workers() for command in spec.commands()]
    assert [command.name for command in commands] == ["prefill-0", "prefill-1", "decode-0"]
    made = workers(plan)
    assert len({one.worker.service.port for one in made}) == 3
    assert made == workers(plan)
    assert {(one.routers, one.devices) for one in made} == {(("127.0.0.1:8700",), 4)}


def test_no_two_processes_of_a_large_cluster_have_one_port(tmp_path: Path):
    many = config(shape=ClusterShape(150, 150), observe=ObserveConfig(metrics_port=20000))
    plan = plan_cluster(many, tmp_path)
    ports = [
        *plan.ports,
        *range(20000, 20301),
        *(port for one in plan.instances for port in one.ports),
    ]
    assert len(set(ports)) == 1 + 301 + 300


def test_routers_log_requests_if_asked(tmp_path: Path):
    for each in (False, True):
        plan = plan_cluster(config(observe=ObserveConfig(log_requests=each)), tmp_path)
        assert plan.router_config(0).router.log_requests is each


def test_a_process_restarts_after_a_cleaner_of_temporary_files(tmp_path: Path):
    folder = tmp_path / "jdisagg-x"
    plan = plan_cluster(config(), folder)
    for _ in range(2):
        (command,) = plan.workers()[0].commands()
        read_config(command.arguments[-1].removeprefix("--config_file="), WorkerProcessConfig)
        shutil.rmtree(folder)


def test_a_process_is_started_with_one_file_that_says_all_it_is(tmp_path: Path):
    plan = plan_cluster(config(), tmp_path)
    (command,) = plan.workers()[0].commands()
    path = command.arguments[-1].removeprefix("--config_file=")
    assert read_config(path, WorkerProcessConfig) == workers(plan)[0]
    (command,) = plan.router().commands()
    path = command.arguments[-1].removeprefix("--config_file=")
    assert read_config(path, RouterProcessConfig) == plan.router_config(0)
    with pytest.raises(ConfigError, match="is not a WorkerProcessConfig"):
        read_config(path, WorkerProcessConfig)


def test_processes_of_an_instance_share_a_name_and_a_coordinator_that_is_new_at_each_start(
    tmp_path: Path,
):
    plan = plan_cluster(config(processes=2), tmp_path)
    names = [command.name for command in plan.workers()[0].commands()]
    assert names == ["prefill-0.0", "prefill-0.1"]
    first, second = (plan.worker_configs(plan.instances[0]) for _ in range(2))
    assert {(one.name, one.process.count, one.devices) for one in first} == {("prefill-0", 2, 2)}
    assert [one.process.index for one in first] == [0, 1]
    coordinators = [{one.process.coordinator for one in start} for start in (first, second)]
    assert len(coordinators[0]) == 1 and coordinators[0] != coordinators[1]


@pytest.mark.parametrize(
    ("ports", "metrics", "said"),
    [
        ("http_port=8701", 0, "--http_port=8701: port 8701 is needed twice"),
        ("http_port=8000", 8698, "--port=8700: port 8700 is needed twice"),
    ],
)
def test_ports_that_follow_each_other_into_the_same_one_are_refused(
    tmp_path: Path, ports: str, metrics: int, said: str
) -> None:
    engine = set_by(config().engine, [f"service.{ports}"])
    observe = ObserveConfig(metrics_port=metrics)
    with pytest.raises(ConfigError, match=said):
        plan_cluster(config(engine=engine, routers=2, observe=observe), tmp_path)


def test_metrics_ports_follow_the_routers(tmp_path: Path):
    plan = plan_cluster(config(observe=ObserveConfig(metrics_port=9100)), tmp_path)
    ports = [plan.router_config(0), *workers(plan)]
    assert [one.observe.metrics_port for one in ports] == [9100, 9101, 9102, 9103]


def test_who_may_change_its_role_has_devices_for_either_layout(tmp_path: Path):
    engine = set_by(EngineConfig(), ["prefill.layout=tp=4", "decode.layout=dp=2"])
    plan = plan_cluster(config(engine=engine, shape=ClusterShape(1, 1, 1)), tmp_path)
    assert [one.devices for one in workers(plan)] == [4, 4, 2]


def test_of_several_routers_one_changes_roles(tmp_path: Path):
    plan = plan_cluster(config(routers=2, changes_roles=True), tmp_path)
    assert plan.addresses == ("127.0.0.1:8700", "127.0.0.1:8701")
    assert [plan.router_config(index).router.changes_roles for index in range(2)] == [True, False]
    assert [spec.name for spec in plan.routers()] == ["router", "router-1"]


@pytest.mark.parametrize(
    ("shape", "changes", "fetches", "returns"),
    [
        ((1, 1), (), True, True),
        ((2, 1), (), True, True),
        ((1, 1), ("decode.codec=fp8",), False, False),
        ((2, 1), ("decode.codec=fp8",), True, False),
        ((2, 1), ("routing.fetch_from_decode=false",), True, False),
        ((2, 1), ("prefix.peer_fetch=false",), False, True),
        ((1, 1), ("prefix.reuse=false",), False, True),
    ],
)
def test_prefill_workers_fetch_where_anybody_gives(
    tmp_path: Path, shape: tuple[int, int], changes: tuple[str, ...], fetches: bool, returns: bool
) -> None:
    engine = set_by(config().engine, changes)
    plan = plan_cluster(config(engine=engine, shape=ClusterShape(*shape)), tmp_path)
    routing = plan.router_config(0).router.routing
    assert (routing.peer_fetch, routing.fetch_from_decode) == (fetches, returns)
    assert {one.worker.prefix.peer_fetch for one in workers(plan)} == {fetches}


def test_http_ports_of_routers_follow_each_other_and_workers_have_none(tmp_path: Path):
    engine = set_by(EngineConfig(), ["service.http_port=8000"])
    plan = plan_cluster(config(engine=engine, routers=2), tmp_path)
    made = [plan.router_config(index) for index in range(2)]
    assert [one.router.service.http_port for one in made] == [8000, 8001]
    assert all(one.observe.on for one in made), "their /metrics has something to show"
    assert [one.worker.service.http_port for one in workers(plan)] == [None] * 3
    drawn = set_by(EngineConfig(), ["service.http_port=0"])
    (first,) = plan_cluster(config(engine=drawn), tmp_path).services
    assert first.http_port and first.http_port != first.port
    (without,) = plan_cluster(config(), tmp_path).services
    assert without.http_port is None


def test_a_layout_that_its_processes_do_not_divide_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"--decode=dp=3\S* has 3 devices, which --processes_per_instance=2 does not",
    ):
        plan_instances(WorkerRole.DECODE, 1, Layout(dp=3), 2, HOST, set())
    with pytest.raises(ConfigError, match=r"has 1 devices a pipeline stage, .* does not divide"):
        plan_instances(WorkerRole.DECODE, 1, Layout(pp=2), 2, HOST, set())
    assert plan_instances(WorkerRole.MIXED, 0, Layout(), 2, HOST, set()) == ()


def test_free_ports_are_different_and_none_that_the_system_lends_to_connections():
    ports = free_ports(HOST, 20)
    assert len(set(ports)) == 20 and max(ports) < 32768


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    with socket.create_server((HOST, 0)) as listening:
        taken = listening.getsockname()[1]
        monkeypatch.setattr("jdisagg.node.cluster_plan._DRAWN", range(taken, taken + 1))
        with pytest.raises(ConfigError, match="no 1 free ports"):
            free_ports(HOST, 1)


def test_a_host_that_is_not_here_is_said_at_once():
    with pytest.raises(ConfigError, match="--host=192.0.2.1 is nowhere to listen"):
        free_ports("192.0.2.1", 1)


def test_copies_of_a_model_agree_and_other_weights_or_types_differ(tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(SHIPPED_MODEL, copy)
    original = model_fingerprint(SHIPPED_MODEL, "float32")
    assert model_fingerprint(copy, "float32") == original
    (copy / "README.md").write_text("notes are no part of the model")
    assert model_fingerprint(copy, "float32") == original
    assert model_fingerprint(copy, "bfloat16") != original
    quantized = {model_fingerprint(copy, "float32", form) for form in ("int8", "int4", "fp8")}
    assert len(quantized | {original}) == 4
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 3] ^= 1
    weights.write_bytes(bytes(data))
    assert model_fingerprint(copy, "float32") != original


def test_workers_with_another_head_that_has_kv_differ_and_assistants_change_nothing(
    tmp_path: Path,
) -> None:
    def drafted(kind: str, tensors: bytes) -> str:
        folder = tmp_path / f"{kind} {tensors.hex()}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        (folder / "model.safetensors").write_bytes(tensors)
        return model_fingerprint(SHIPPED_MODEL, "float32", draft=str(folder))

    plain = model_fingerprint(SHIPPED_MODEL, "float32")
    assert len({plain, drafted("llama", b"one"), drafted("llama", b"two")}) == 3
    assert drafted("gemma4_assistant", b"one") == plain


def test_an_ipv6_host_is_bracketed_wherever_a_port_follows(tmp_path: Path):
    engine = set_by(EngineConfig(), ["service.host=::1"])
    made = config(engine=engine, shape=ClusterShape(mixed=1))
    instance = InstancePlan("mixed-0", WorkerRole.MIXED, Layout(), (8701,))
    plan = ClusterPlan(made, (8700, 8702), (instance,), tmp_path)
    assert plan.addresses == ("[::1]:8700", "[::1]:8702")
    (one,) = workers(plan)
    assert (one.routers, one.worker.service.host) == (plan.addresses, "::1")


def test_workers_with_stages_cut_into_the_same_layer_groups_and_keep_their_roles() -> None:
    staged = set_by(EngineConfig(), ["prefill.layout=pp=2", "decode.layout=pp=3"])
    groups = {
        worker_config(staged, role).instance.layer_groups
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    }
    assert groups == {12}
    with pytest.raises(ConfigError, match=r"--elastic: workers with pipeline stages \(pp=3\)"):
        config(engine=staged, changes_roles=True)
