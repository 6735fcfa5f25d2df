"""Which GPUs each process gets, and what its environment says of them, before it is started."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, InstanceConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.cluster_plan import ClusterConfig, plan_cluster
from jdisagg.node.gpus import gpus_of_host, local_devices, parse_gpus
from jdisagg.node.recipes import ClusterShape

TWO = InstanceConfig(layout=Layout(tp=2))


def environments(tmp_path: Path, **changes: object) -> dict[str, tuple[str, str]]:
    """(CUDA_VISIBLE_DEVICES, XLA_CLIENT_MEM_FRACTION) of each worker's process."""
    config = ClusterConfig(
        EngineConfig(prefill=TWO, decode=TWO), ClusterShape(prefill=2, decode=2), "/model"
    )
    plan = plan_cluster(replace(config, **changes), tmp_path)  # type: ignore[arg-type]
    commands = [command for group in plan.workers() for command in group.commands()]
    assert all(command.environment and "PATH" in command.environment for command in commands)
    return {
        command.name: (
            (command.environment or {})["CUDA_VISIBLE_DEVICES"],
            (command.environment or {})["XLA_CLIENT_MEM_FRACTION"],
        )
        for command in commands
    }


def test_four_workers_share_out_the_eight_gpus_of_a_host(tmp_path: Path) -> None:
    assert environments(tmp_path, gpus=tuple(range(8)), gpus_per_process=2) == {
        "prefill-0": ("0,1", "0.9000"),
        "prefill-1": ("2,3", "0.9000"),
        "decode-0": ("4,5", "0.9000"),
        "decode-1": ("6,7", "0.9000"),
    }


def test_each_process_of_an_instance_has_its_own(tmp_path: Path) -> None:
    found = environments(tmp_path, gpus=tuple(range(8)), processes=2)
    assert list(found) == [
        f"{r}-{i}.{p}" for r in ("prefill", "decode") for i in (0, 1) for p in (0, 1)
    ]
    assert [gpus for gpus, _ in found.values()] == [str(index) for index in range(8)]


def test_workers_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    engine = EngineConfig(
        prefill=InstanceConfig(memory_fraction=0.8), decode=InstanceConfig(memory_fraction=0.8)
    )
    found = environments(tmp_path, engine=engine, gpus=(0, 0, 1, 1))
    assert list(found.values()) == [
        ("0", "0.4000"),
        ("0", "0.4000"),
        ("1", "0.4000"),
        ("1", "0.4000"),
    ]


def test_without_gpus_nobody_is_told_anything(tmp_path: Path) -> None:
    config = ClusterConfig(EngineConfig(), ClusterShape(prefill=1, decode=1), "/model")
    plan = plan_cluster(config, tmp_path)
    assert all(c.environment is None for group in plan.workers() for c in group.commands())


def test_too_few_gpus_are_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need 8 GPUs \(prefill-0 2, .*\) and there are 4"):
        environments(tmp_path, gpus=(0, 1, 2, 3))
    with pytest.raises(ConfigError, match="--gpus_per_worker=1: prefill-0 .* needs 2"):
        environments(tmp_path, gpus=tuple(range(8)), gpus_per_process=1)
    with pytest.raises(ConfigError, match="one of them twice"):
        environments(tmp_path, gpus=(0, 0, 1, 1, 2, 2, 3, 3))


def test_ranges_of_indices_are_read_and_others_refused_by_name() -> None:
    assert parse_gpus("gpus", "0-3,6") == (0, 1, 2, 3, 6)
    for text in ("", "a", "3-1", "0,,1", "-1", "0-"):
        with pytest.raises(ConfigError, match=f"--gpus={text}"):
            parse_gpus("gpus", text)


def test_a_hosts_gpus_are_those_it_has_and_was_left(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_of_host({}, tmp_path) == (0, 1, 10)
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": "1,10"}, tmp_path) == (1, 10)
    assert gpus_of_host({"JAX_PLATFORMS": "cpu"}, tmp_path) == ()
    assert gpus_of_host({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == (0, 1, 10)


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "5"}, [5]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, [4, 5, 6, 7]),
        ({}, None),
    ],
)
def test_a_task_of_a_scheduler_takes_its_share_of_the_nodes_gpus(environment, devices) -> None:
    assert local_devices(environment, 8) == devices


def test_gpus_that_tasks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 tasks on a node of 8 GPUs"):
        local_devices({"SLURM_NTASKS_PER_NODE": "3", "SLURM_LOCALID": "0"}, 8)
