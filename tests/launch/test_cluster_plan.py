"""Which processes make a cluster, as data; and what makes two copies of a model the same."""

import shutil
import socket
from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from launch.cluster_plan import ClusterPlan, InstancePlan, free_ports, plan_instances
from launch.fingerprint import model_fingerprint
from launch.shipped import SHIPPED_MODEL

HOST = "127.0.0.1"


def plan(processes: int = 1, metrics_port: int = 0) -> ClusterPlan:
    instances = (
        *plan_instances("prefill", 2, "dp=1,tp=4", processes, HOST),
        *plan_instances("decode", 1, "dp=2,tp=2", processes, HOST),
    )
    return ClusterPlan(HOST, 8700, instances, ("--dtype=float32",), ("--model=m",), metrics_port)


def test_each_process_has_a_name_and_a_port_of_its_own_and_keeps_them():
    specs = plan().workers()
    commands = [command for spec in specs for command in spec.commands()]
    assert [command.name for command in commands] == ["prefill-0", "prefill-1", "decode-0"]
    ports = [next(flag for flag in command.arguments if flag.startswith("--port=")) for command in commands]
    assert len(set(ports)) == 3
    assert [command for spec in specs for command in spec.commands()] == commands
    assert all({"--router=127.0.0.1:8700", "--dtype=float32", "--devices=4"} <= set(command.arguments) for command in commands)


def test_processes_of_an_instance_share_a_name_and_a_coordinator_that_is_new_at_each_start():
    spec = plan(processes=2).workers()[0]
    first, second = spec.commands(), spec.commands()
    assert [command.name for command in first] == ["prefill-0.0", "prefill-0.1"]
    assert all({"--name=prefill-0", "--num_processes=2", "--devices=2"} <= set(command.arguments) for command in first)

    def coordinators(commands: object) -> set[str]:
        return {flag for command in commands for flag in command.arguments if flag.startswith("--coordinator=")}  # type: ignore[attr-defined]

    assert len(coordinators(first)) == 1 and coordinators(first) != coordinators(second)


def test_metrics_ports_follow_the_routers():
    planned = plan(metrics_port=9100)
    commands = [*planned.router().commands(), *(command for spec in planned.workers() for command in spec.commands())]
    ports = [flag for command in commands for flag in command.arguments if flag.startswith("--metrics_port=")]
    assert ports == [f"--metrics_port={port}" for port in range(9100, 9104)]


def test_who_may_change_its_role_has_devices_for_either_layout():
    instances = (
        *plan_instances("prefill", 1, "tp=4", 1, HOST),
        *plan_instances("decode", 1, "dp=2", 1, HOST),
        *plan_instances("mixed", 1, "tp=1", 1, HOST),
    )
    commands = [command for spec in ClusterPlan(HOST, 8700, instances, (), ()).workers() for command in spec.commands()]
    assert [flag for command in commands for flag in command.arguments if flag.startswith("--devices=")] == ["--devices=4"] * 2 + [
        "--devices=1"
    ]


def test_of_several_routers_one_changes_roles():
    planned = ClusterPlan(HOST, 8700, (), (), (), more_ports=(8701,), elastic=True)
    assert ["--elastic" in command.arguments for spec in planned.routers() for command in spec.commands()] == [True, False]


def test_a_layout_that_its_processes_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"--decode_layout=dp=3,tp=1 has 3 devices, which --processes_per_instance=2 does not divide"):
        plan_instances("decode", 1, "dp=3,tp=1", 2, HOST)
    assert plan_instances("mixed", 0, "dp=1,tp=1", 2, HOST) == ()


def test_free_ports_are_different_and_none_that_the_system_lends_to_connections():
    ports = free_ports(HOST, 20)
    assert len(set(ports)) == 20 and max(ports) < 32768


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    with socket.create_server((HOST, 0)) as listening:
        taken = listening.getsockname()[1]
        monkeypatch.setattr("launch.cluster_plan._DRAWN", range(taken, taken + 1))
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
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 3] ^= 1
    weights.write_bytes(bytes(data))
    assert model_fingerprint(copy, "float32") != original


def test_an_ipv6_host_is_bracketed_wherever_a_port_follows():
    planned = ClusterPlan("::1", 8700, (InstancePlan("mixed-0", "mixed", Layout(), (8701,)),), (), (), more_ports=(8702,))
    assert planned.addresses == ("[::1]:8700", "[::1]:8702")
    (command,) = planned.workers()[0].commands()
    assert {"--router=[::1]:8700,[::1]:8702", "--host=::1"} <= set(command.arguments)
