"""Kernels are checked in child processes at the start, and replaced by XLA where they fail."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from jdisagg.engine import kernel_check
from jdisagg.engine.kernel_check import check_kernels, choose_kernels
from jdisagg.errors import ConfigError
from jdisagg.ops import optional_kernels
from jdisagg.ops.optional_kernels import (
    BLOCK_EXPERTS,
    KERNELS,
    KERNELS_OF,
    LATENT_ATTENTION,
    PAGED_ATTENTION,
    usable,
)
from tests import time_scale

# A child whose kernels fail in each way. Every start of the child adds a line to a file.
CHILD = """
import os, sys, time
from jdisagg.engine.kernel_check import run_probes

def refused():
    raise RuntimeError("ptxas: unsupported\\nsecond line")

open(sys.argv[1], "a").write("start\\n")
run_probes(sys.argv[2:], {
    "good": lambda: 0.001,
    "wrong": lambda: 0.5,
    "nan": lambda: float("nan"),
    "refused": refused,
    "crash": os.abort,
    "slow": lambda: time.sleep(600),
    "later": lambda: 0.0,
})
"""


@pytest.fixture(autouse=True)
def _all_kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kernels, "_off", set())
    monkeypatch.setattr(kernel_check, "_failed", {})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def test_a_kernel_that_fails_in_any_way_is_named_with_its_reason_and_the_others_are_still_checked(
    tmp_path: Path,
) -> None:
    script, starts = tmp_path / "child.py", tmp_path / "starts"
    script.write_text(textwrap.dedent(CHILD))
    failed = check_kernels(
        ("good", "wrong", "nan", "refused", "crash", "later"),
        (sys.executable, str(script), str(starts)),
        time_scale.seconds(30),
    )
    assert starts.read_text().count("start") == 2, "the crash took effect, and a child followed"
    assert set(failed) == {"wrong", "nan", "refused", "crash"}
    assert "differs from its XLA form by 0.5" in failed["wrong"]
    assert failed["refused"] == "RuntimeError: ptxas: unsupported"
    assert "status -6" in failed["crash"]


@pytest.mark.ci
def test_a_kernel_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    command = (sys.executable, str(script), str(tmp_path / "starts"))
    # Two names share the time of the first child; the second child has one name's.
    failed = check_kernels(("slow", "later"), command, time_scale.seconds(10))
    assert set(failed) == {"slow"} and "did not end" in failed["slow"]


def test_a_child_that_cannot_start_fails_every_kernel() -> None:
    failed = check_kernels(("good", "later"), (sys.executable, "-c", "raise SystemExit(3)"))
    assert set(failed) == {"good", "later"} and "status 3" in failed["good"]


def test_a_child_gets_the_first_chip_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "4,5")
    code = "import os, sys; sys.exit('chip ' + os.environ['TPU_VISIBLE_CHIPS'])"
    assert "(chip 4)" in check_kernels(("good",), (sys.executable, "-c", code))["good"]


def test_kernels_are_checked_on_accelerators_only_and_the_result_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks: list[int] = []

    def check() -> dict[str, str]:
        checks.append(1)
        return {PAGED_ATTENTION: "refused by the driver"}

    monkeypatch.setattr(kernel_check, "check_kernels", lambda names: check())
    assert choose_kernels("auto", accelerator="", folder=str(tmp_path)) == {}
    assert not checks and all(map(usable, KERNELS))
    for _ in range(2):
        choose_kernels("auto", accelerator="gpu", folder=str(tmp_path))
    assert checks == [1]
    assert [name for name in KERNELS if not usable(name)] == [PAGED_ATTENTION]
    assert kernel_check.failed_kernels() == (f"{PAGED_ATTENTION}: refused by the driver",)
    assert "replaced by its XLA form: refused by the driver" in caplog.text
    (stored,) = tmp_path.glob("kernels-*.json")
    stored.write_text("broken")
    choose_kernels("auto", accelerator="gpu", folder=str(tmp_path))
    assert checks == [1, 1] and json.loads(stored.read_text())


def test_kernels_chosen_by_hand_are_not_checked() -> None:
    assert choose_kernels(f"{BLOCK_EXPERTS}, {LATENT_ATTENTION}", accelerator="gpu") == {}
    assert {name for name in KERNELS if usable(name)} == {BLOCK_EXPERTS, LATENT_ATTENTION}
    assert choose_kernels("xla", accelerator="gpu") == {}
    assert not any(map(usable, KERNELS))


def test_an_unknown_kernel_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="no kernel named flash; give auto, xla, or names of pag"):
        choose_kernels("flash", accelerator="gpu")


@pytest.mark.ci
def test_probes_compare_the_kernels_with_their_xla_forms() -> None:
    """In interpret mode, the kernels that have one."""
    assert kernel_check.decode_attention(interpret=True) < kernel_check.BOUND
    assert kernel_check.latent_attention(interpret=True) < kernel_check.BOUND
    assert kernel_check.expert_products(interpret=True) < kernel_check.BOUND
    assert kernel_check.prefill_attention(platform="cpu") == 0.0
    assert kernel_check.filtered_draw(interpret=True) == 0.0
    assert set(kernel_check.PROBES) == set(KERNELS)


def test_the_kernels_of_the_accelerator_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(kernel_check, "check_kernels", lambda names: checked.extend(names) or {})
    for accelerator in ("gpu", "tpu"):
        choose_kernels("auto", accelerator=accelerator)
        assert tuple(checked) == KERNELS_OF[accelerator]
        checked.clear()


def test_a_kernel_that_is_switched_off_is_not_chosen() -> None:
    import jax.numpy as jnp

    from jdisagg.ops import (
        filtered_draw_pallas,
        grouped_products_gpu,
        latent_attention_pallas,
        paged_attention_pallas,
    )
    from jdisagg.ops import prefill_attention_cudnn as cudnn
    from jdisagg.ops import prefill_attention_tpu as tpu
    from jdisagg.ops.quantized_weights import KernelForm

    q_BNH, pages = jnp.zeros((2, 8, 128), jnp.bfloat16), jnp.zeros((4, 2, 64, 128), jnp.bfloat16)
    latent, cached = jnp.zeros((2, 8, 576), jnp.bfloat16), jnp.zeros((4, 1, 64, 576), jnp.bfloat16)
    int4 = KernelForm(False, "int4", "gpu")

    def chosen() -> list[bool]:
        return [
            paged_attention_pallas.applies(q_BNH, pages),
            latent_attention_pallas.applies(latent, cached, 512),
            cudnn.applies(q_BNH, platform="gpu"),
            tpu.applies(q_BNH, q_BNH, None, platform="tpu", device_kind="TPU v6e", latent=False),
            grouped_products_gpu.wgmma_applies(q_BNH[0], 256, "H100"),
            int4.packed(experts=True),
            filtered_draw_pallas.applies(),
        ]

    assert all(chosen())
    choose_kernels("xla", accelerator="gpu")
    assert not any(chosen())
