"""Which TPU chips each process gets, and the environment by which libtpu learns of them."""

from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, InstanceConfig
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.platforms import TPU_CHIPS
from jdisagg.node import tpus
from jdisagg.node.cluster_plan import ClusterConfig, plan_cluster
from jdisagg.node.recipes import ClusterShape

FOUR = InstanceConfig(layout=Layout(tp=4))


@pytest.fixture(autouse=True)
def a_tpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpus, "has_libtpu", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setenv(TPU_CHIPS, "0,1,2,3,4,5,6,7")


def test_two_workers_share_out_the_chips_of_a_host(tmp_path: Path) -> None:
    config = ClusterConfig(
        EngineConfig(prefill=FOUR, decode=FOUR),
        ClusterShape(prefill=1, decode=1),
        "/model",
        gpus=tuple(range(8)),
    )
    commands = [
        command
        for group in plan_cluster(config, tmp_path).workers()
        for command in group.commands()
    ]
    found = {command.name: command.environment or {} for command in commands}
    assert {name: each["TPU_VISIBLE_CHIPS"] for name, each in found.items()} == {
        "prefill-0": "0,1,2,3",
        "decode-0": "4,5,6,7",
    }
    for environment in found.values():
        assert environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
        assert environment["TPU_PROCESS_BOUNDS"] == "1,1,1"
        assert "PATH" in environment and "XLA_CLIENT_MEM_FRACTION" not in environment


@pytest.mark.parametrize(
    ("chips", "every", "said"),
    [
        ((0, 1, 2), tuple(range(8)), "must be one of 1, 2, 4, 8, got 3"),
        ((0,), (0, 0), "TPU chip 0 is given to two workers"),
    ],
)
def test_what_libtpu_cannot_divide_is_refused(
    chips: tuple[int, ...], every: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        tpus.chip_environment({}, chips, every)


def test_chips_are_found_by_their_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vfio").mkdir()
    for name in ("vfio/0", "vfio/1", "vfio/vfio"):
        (tmp_path / name).touch()
    assert tpus.chips_of_host({}, tmp_path) == (0, 1)
    for index in range(4):
        (tmp_path / f"accel{index}").touch()
    assert tpus.chips_of_host({}, tmp_path) == (0, 1, 2, 3)
    assert tpus.chips_of_host({"JAX_PLATFORMS": "cpu"}, tmp_path) == ()
    monkeypatch.setattr(tpus, "has_libtpu", lambda: False)
    assert tpus.chips_of_host({}, tmp_path) == ()
