"""The experts that an executor reads from its pages are those of a dense pass, for chunks and for
decode steps of two layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.config import Mode
from jdisagg.engine.replica import build_executor
from jdisagg.errors import ConfigError
from jdisagg.executor.expert_reader import experts_as_values, values_as_experts
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.messages.step_commands import (
    DecodeResult,
    DecodeSteps,
    DraftRow,
    SampleSpec,
    SlotAdmit,
)
from jdisagg.prompt.experts import ChosenExperts
from jdisagg.request import SamplingParams
from jdisagg.transfer.in_process import InProcessChannel
from models.checkpoint import load_model
from tests.end_to_end.dense_experts import as_array, dense_experts
from tests.executor.prompts import part, prompt, run
from tests.lanes import first_ci
from tests.shapes import CONTEXT, LAYER_GROUPS, MOE, instance

PARAMS = SamplingParams(temperature=0.0, logprobs=0, return_routed_experts=True)
ASKS = SampleSpec(0, PARAMS)
SILENT = SampleSpec(0, replace(PARAMS, return_routed_experts=False))


def one_mesh(layout: str) -> MeshExecutor:
    shape = Layout.parse(layout)
    loaded = load_model(str(MOE), shape, jax.devices()[: shape.devices])
    config = instance(layout, pages_per_rank=24, routed_experts=True)
    role, channel = MeshRole(True, True), InProcessChannel(MonotonicClock())
    how = (Mode.UNIFIED, loaded, role, channel, CONTEXT, LAYER_GROUPS)
    return build_executor("m", config, *how)


@pytest.mark.ci
@pytest.mark.parametrize(("layout",), first_ci([("dp=2,tp=2,ep=4",), ("tp=2",)], ci=2))
def test_chunks_and_steps_return_the_experts_of_a_dense_pass(layout: str) -> None:
    """A prompt of two chunks, beside a sequence in another slot that does not ask. Then the same
    tokens again, in a step with four drafts, of which the last is wrong."""
    executor = one_mesh(layout)
    try:
        ids, other = prompt(1, 100), prompt(2, 9)
        assert not run(executor, part(0, 0, 0, ids, 0, 64)).samples
        rows = part(0, 0, 0, ids, 64, 100, ASKS), part(1, 0, 48, other, 0, 9, SILENT)
        first, beside = run(executor, *rows).samples
        assert first.logprobs and first.logprobs.experts and first.logprobs.experts.positions == 100
        assert beside.logprobs and beside.logprobs.experts is None
        silent = SlotAdmit(1, 0, 0, beside.token, 9, 40, tuple(range(8, 11)), SILENT)
        asks = SlotAdmit(0, 0, 2, first.token, 100, 128, tuple(range(8)), ASKS)
        slots = ((0, 2), *((),) * (executor.limits.ranks - 1))
        result = executor.issue_and_wait(DecodeSteps(2, 11, slots, (silent, asks)))
        assert isinstance(result, DecodeResult)
        assert all(one and one.experts is None for one in result.logprobs[0][0])
        found = [first.logprobs.experts, *(one.experts for one in result.logprobs[0][1] if one)]
        whole = [*ids, first.token, *result.tokens[0][1]][:-1]
        joined = ChosenExperts.joined(found)
        np.testing.assert_array_equal(as_array(joined), dense_experts(MOE, whole))

        made = result.tokens[0][1]
        guesses = (*made[:3], (made[3] + 1) % 1000)
        draft = DraftRow(0, 0, 101, guesses, len(guesses))
        command = DecodeSteps(3, 1, ((2,), *slots[1:]), (asks,), drafts=(draft,))
        result = executor.issue_and_wait(command)
        assert isinstance(result, DecodeResult) and result.tokens[0][0] == made[:4]
        found = [one.experts for one in result.logprobs[0][0] if one]
        assert [one and one.positions for one in found] == [1] * 4
        of_drafts = np.concatenate([as_array(one) for one in found])
        np.testing.assert_array_equal(of_drafts, dense_experts(MOE, whole)[100:104])
    finally:
        executor.close()


@pytest.mark.parametrize(("experts", "width"), [(256, 16), (1000, 16), (1000, 48)])
def test_numbers_of_experts_are_exact_in_the_narrowest_type_of_kv(experts: int, width: int) -> None:
    chosen_TJ = np.random.default_rng(experts).integers(0, experts, (50, 8)).astype(np.int32)
    kept = experts_as_values(jnp.asarray(chosen_TJ), width).astype(jnp.bfloat16)
    assert kept.shape == (50, 1, width)
    np.testing.assert_array_equal(values_as_experts(kept[:, 0], 8), chosen_TJ)


def test_a_spec_that_records_experts_can_be_cut_like_the_one_without() -> None:
    """Over KV heads, and into layer groups; layers without experts stay as they are."""
    kv, latent = (KVComponent("k", 4, 32), KVComponent("v", 4, 32)), KVComponent("latent", 0, 576)
    for parts in (kv, (latent,)):
        layers = KVLayer(parts), KVLayer(parts, experts=(8, 256)), KVLayer(parts, experts=(8, 512))
        spec = KVSpec(layers, "bfloat16")
        recorded = spec.recording()
        assert recorded.layers[0] == layers[0] and not spec.records and recorded.records
        assert (recorded.row_heads, recorded.cuts) == (spec.row_heads, spec.cuts)
        assert recorded.row_width == 16
    with pytest.raises(ConfigError, match="routed_experts: the model has no layer with experts"):
        KVSpec(layers[:1], "bfloat16").recording()
