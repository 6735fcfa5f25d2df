"""Pipeline stages in the plans of an instance: layer groups, memory, and refusals by name."""

from dataclasses import replace

import pytest

from jdisagg.config import InstanceConfig, Mode, ModelConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import accelerator
from jdisagg.engine.limits import asked_groups, groups_of_layers, mesh_limits, stage_cut
from jdisagg.engine.memory_plan import DeviceMemory, fit_instance
from jdisagg.engine.stages import check_stages
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.messages.worker_status import WorkerRole

SPEC = KVSpec.attention(80, 8, 128, "bfloat16")
TWO = InstanceConfig(layout=Layout(pp=2, tp=2))


@pytest.mark.parametrize("pps", [(2, 1), (1, 4), (2, 3), (4, 3)])
def test_stages_of_both_sides_are_equally_long_where_the_layers_allow(pps: tuple[int, int]) -> None:
    assert asked_groups(None, 1, 1) is None and asked_groups(7, *pps) == 7
    groups = asked_groups(None, *pps)
    for pp in pps:
        runs = stage_cut(pp, groups)(SPEC)
        assert len(runs) == pp and sum(map(len, runs)) == 80
        assert max(map(len, runs)) - min(map(len, runs)) <= -(-80 // groups_of_layers(SPEC, groups))


def test_each_layer_group_is_a_block_and_a_chunk_is_in_each_stage() -> None:
    limits = mesh_limits(TWO, Mode.DISAGGREGATED, SPEC, 4096, asked_groups(None, 2, 1))
    assert limits.stages == 2
    assert limits.bands(16) == limits.bands(512) == tuple(range(at, at + 1) for at in range(4))


def test_a_stage_cannot_have_less_than_a_layer_group_nor_a_block_two_stages() -> None:
    with pytest.raises(
        ConfigError, match="pp=2 exceeds the 1 groups of layers.*raise layer_groups"
    ):
        mesh_limits(TWO, Mode.DISAGGREGATED, SPEC, 4096, 1)
    merged = replace(TWO, block_bytes=1 << 20)
    with pytest.raises(ConfigError, match="block_bytes=1048576 must be 0 with pipeline stages"):
        mesh_limits(merged, Mode.DISAGGREGATED, SPEC, 4096, 4)


NOTHING = {"state": False, "windows_apart": False, "drafts": False, "reads_tokens": False}


def test_what_stages_do_not_support_is_refused_with_reason_and_remedy() -> None:
    for instance, facts, message in (
        (TWO, {"state": True}, "recurrent state.*use pp=1"),
        (TWO, {"windows_apart": True}, "sliding window.*mode=chunked"),
        (TWO, {"reads_tokens": True}, "tokens' embeddings.*use pp=1"),
        (replace(TWO, speculate="mtp"), {"drafts": True}, "drafts tokens.*ngram or off"),
    ):
        known = NOTHING | facts
        with pytest.raises(ConfigError, match=f"layout dp=1,tp=2,ep=1,pp=2: .*{message}"):
            check_stages(instance, **known)
        check_stages(replace(instance, layout=Layout()), **known)
    # drafts from the own tokens need no layer behind the last stage
    check_stages(replace(TWO, speculate="ngram"), **(NOTHING | {"drafts": True}))


def test_the_plan_of_a_device_is_that_of_the_longest_stage_with_all_of_embedding_and_head() -> None:
    shape, memory = geometry("llama-3.1-70b"), DeviceMemory(10**12, "a large one")
    model = ModelConfig(dtype="bfloat16", context_tokens=8192)
    sizes = {}
    for pp in (1, 2, 3):
        instance = InstanceConfig(layout=Layout(tp=4, pp=pp), slots_per_rank=4)
        _, plan = fit_instance(
            instance, WorkerRole.PREFILL, Mode.DISAGGREGATED, model, shape, memory
        )
        sizes[pp] = plan.weights, plan.pages
    costs = CostModel(shape, accelerator("h100"), Layout(tp=4))
    assert sizes[1][0] == int(costs.weight_bytes_per_device)
    embedded = costs.stage_weight_bytes(0)
    # 80 layers in 6 groups: 14, 14, 13, 13, 13, 13.
    for pp, longest in ((2, 40), (3, 28)):
        assert sizes[pp][0] == int(embedded + (sizes[1][0] - embedded) * longest / 80)
        assert sizes[pp][1] == pytest.approx(sizes[1][1] * longest / 80, rel=1e-6)
