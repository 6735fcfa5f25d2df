"""Which GPUs each process gets, and what its environment says of them, before it is started."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, InstanceConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node import worker_process
from jdisagg.node.cluster_plan import ClusterConfig, plan_cluster
from jdisagg.node.gpus import gpus_of_host, local_devices, parse_gpus
from jdisagg.node.recipes import ClusterShape
from jdisagg.node.run_files import ProcessPlace
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

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
    assert list(found.values()) == [("0", "0.4000")] * 2 + [("1", "0.4000")] * 2


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


def test_jax_is_told_the_part_of_the_memory_under_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses to start where both are there."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".4")
    config = ClusterConfig(EngineConfig(), ClusterShape(1, 1), "/model", gpus=(0, 0))
    workers = plan_cluster(config, tmp_path).workers()
    for command in [command for group in workers for command in group.commands()]:
        told = command.environment or {}
        assert [name for name in told if "MEM_FRACTION" in name] == ["XLA_CLIENT_MEM_FRACTION"]
        assert told["XLA_CLIENT_MEM_FRACTION"] == "0.4500"


def test_ranges_of_indices_are_read_and_others_refused_by_name() -> None:
    assert parse_gpus("gpus", "0-3,6") == (0, 1, 2, 3, 6)
    assert parse_gpus("gpus", "0,0") == (0, 0)
    with pytest.raises(ConfigError, match="--gpus=0,1,0 has one GPU twice"):
        parse_gpus("gpus", "0,1,0", several=False)
    for text in ("", "a", "3-1", "0,,1", "-1", "0-"):
        with pytest.raises(ConfigError, match=f"--gpus={text}"):
            parse_gpus("gpus", text)


def test_a_hosts_gpus_are_those_it_has_and_was_left(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_of_host({}, tmp_path) == (0, 1, 2)
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": "1, 10"}, tmp_path) == (1, 10)
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert gpus_of_host({"JAX_PLATFORMS": "cpu"}, tmp_path) == ()
    assert gpus_of_host({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == (0, 1, 2)


def test_gpus_of_a_container_are_counted_as_cuda_does(tmp_path: Path) -> None:
    """Whatever the host calls them: the files of a container that was given the last two."""
    for name in ("nvidia6", "nvidia7", "nvidiactl"):
        (tmp_path / name).touch()
    assert gpus_of_host({}, tmp_path) == (0, 1)


def test_gpus_that_are_named_by_uuid_are_handed_on_by_uuid(tmp_path: Path) -> None:
    visible = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-3a1c,-1,5"
    gpus = gpus_of_host({"CUDA_VISIBLE_DEVICES": visible}, tmp_path)
    assert gpus == ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-3a1c")  # CUDA stops at the -1
    engine = EngineConfig()
    config = ClusterConfig(engine, ClusterShape(prefill=1, decode=1), "/model", gpus=gpus)
    plan = plan_cluster(config, tmp_path)
    told = [command.environment or {} for group in plan.workers() for command in group.commands()]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == list(gpus)


STEP, LOCAL, NODE = "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_GPUS_ON_NODE"
MPI = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SHARES: list[tuple[dict[str, str], int, list[int] | None]] = [
    ({"SLURM_NTASKS_PER_NODE": "1", LOCAL: "0"}, 8, list(range(8))),
    ({STEP: "8(x2)", LOCAL: "5"}, 8, [5]),
    (MPI, 8, [4, 5, 6, 7]),
    ({}, 8, None),
    ({STEP: "2", LOCAL: "0"}, 0, None),
    # sbatch --ntasks-per-node=8 leaves its number in the environment of every srun
    ({"SLURM_NTASKS_PER_NODE": "8", STEP: "1(x2)", LOCAL: "0"}, 4, [0, 1, 2, 3]),
    # a task that sees its own GPUs alone: srun --ntasks-per-node=4 --gpus-per-task=2, and =1
    ({STEP: "4", LOCAL: "3", NODE: "8"}, 2, [0, 1]),
    ({STEP: "8", LOCAL: "3", NODE: "8"}, 1, [0]),
    # mpirun with a wrapper that sets it
    (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "CUDA_VISIBLE_DEVICES": "1"}, 1, [0]),
]


@pytest.mark.parametrize(("environment", "gpus", "devices"), SHARES)
def test_a_task_of_a_scheduler_takes_its_share_of_the_gpus_that_it_sees(
    environment: dict[str, str], gpus: int, devices: list[int] | None
) -> None:
    assert local_devices(environment, gpus) == devices


def test_gpus_that_tasks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_NTASKS_PER_NODE=3 tasks on a node of 8 GPUs"):
        local_devices({"SLURM_NTASKS_PER_NODE": "3", "SLURM_LOCALID": "0"}, 8)
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE=0 tasks"):
        local_devices({"SLURM_STEP_TASKS_PER_NODE": "0", "SLURM_LOCALID": "0"}, 8)
    # all tasks see both
    job = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_GPUS_ON_NODE": "2", "SLURM_LOCALID": "0"}
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE=3 tasks on a node of 2 GPUs"):
        local_devices(job | {"CUDA_VISIBLE_DEVICES": "0,1"}, 2)
    with pytest.raises(ConfigError, match="SLURM_LOCALID=x is not a number"):
        local_devices({"SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "x"}, 8)


@pytest.mark.parametrize(("gpus", "said"), [("0,1", [0, 1]), ("", None)])
def test_a_process_that_is_told_its_place_takes_all_it_sees_even_under_slurm(
    monkeypatch: pytest.MonkeyPatch, gpus: str, said: list[int] | None
) -> None:
    """JAX gives a task of Slurm one device unless it is told which."""
    asked: list[object] = []
    monkeypatch.setattr(worker_process, "join_instance", lambda *given: asked.append(given[3]))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    worker_process.join(ProcessPlace(0, 2, "localhost:1"), DEFAULT_TIMEOUTS.instance)
    assert asked == [said]
