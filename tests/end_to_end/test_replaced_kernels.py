"""A server whose hand-written kernels fail their check serves by plain XLA, and reports each."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.engine import kernel_check
from jdisagg.engine.kernel_check import choose_kernels
from jdisagg.layout import platforms
from jdisagg.observe.sources import Reading, reading_families
from jdisagg.ops import optional_kernels
from jdisagg.ops.optional_kernels import KERNELS_OF, PAGED_ATTENTION, usable
from tests.end_to_end.clusters import dense_greedy
from tests.end_to_end.doors import served
from tests.shapes import LLAMA, config

pytestmark = pytest.mark.ci


async def test_kernels_that_fail_are_replaced_and_the_line_the_status_and_the_counter_name_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU stands for a GPU whose driver refuses every kernel: the real child process runs the
    real probes, and no GPU kernel can be compiled here."""
    monkeypatch.setattr(optional_kernels, "_off", set())
    monkeypatch.setattr(kernel_check, "_failed", {})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    traits = replace(platforms.traits_of("cpu"), kernels="gpu")
    monkeypatch.setitem(platforms._TRAITS, "cpu", traits)
    assert usable(PAGED_ATTENTION), "a decode step would take the kernel"
    failed = choose_kernels("auto", accelerator="gpu")
    assert set(failed) == set(KERNELS_OF["gpu"])
    assert "kernel paged_attention is replaced by its XLA form: " in caplog.text
    async with served(config()) as door:
        prompt = door.run.tokenizer.encode("Once upon a time")
        done = await door.client.complete(
            "Once upon a time", temperature=0, max_tokens=20, ignore_eos=True
        )
        assert done.choices[0].token_ids == dense_greedy(LLAMA, prompt, 20)
        statuses = await door.client.status()
    expected = tuple(f"{name}: {reason}" for name, reason in failed.items())
    assert [status.kernels for status in statuses] == [expected] * 2
    readings = [Reading("server", (), True, statuses, None)]
    families = {family.name: family for family in reading_families(readings)}
    counts = [sample.value for sample in families["jdisagg_worker_replaced_kernels"].samples]
    assert counts == [len(failed)] * 2
