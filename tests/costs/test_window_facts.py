"""The calculator's figures for windowed models against what a decode mesh holds and a hand-off
transfers."""

import pytest

from jdisagg.config import InstanceConfig, Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.kv_facts import held_bytes, kv_facts, sent_part
from jdisagg.engine.limits import mesh_limits
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.simulator.step_costs import ModelCosts
from jdisagg.worker.block_moves import offers_of_pages, snapshot_offers
from tests.costs.named import H100, LLAMA_70B

GPT = geometry("gpt-oss-20b")
SPEC = KVSpec.attention(24, 8, 64, "bfloat16", (128, None) * 12)


@pytest.mark.parametrize("tokens", [64, 128, 1000, 32_768])
def test_the_calculator_says_what_is_held_and_what_is_sent(tokens: int) -> None:
    assert GPT.kv_bytes_per_token() == SPEC.bytes_per_token
    assert GPT.windowed_bytes_per_token() == SPEC.windowed.bytes_per_token
    limits = mesh_limits(
        InstanceConfig(page_size=64, chunk_tokens=512),
        Mode.DISAGGREGATED,
        SPEC,
        tokens,
        None,
        windows_apart=True,
        rings=True,
    )
    held = 64 * (
        pages_for(tokens, 64) * limits.sent.bytes_per_token
        + limits.ring_pages * SPEC.windowed.bytes_per_token
    )
    assert held_bytes(GPT, "bfloat16", tokens, 64) == held
    assert limits.ring_pages * 64 <= 128 + 64
    ids = iter(range(10_000))
    bytes_of = [
        (offers_of_pages(limits, 0, 0, tokens, ids.__next__), SPEC.unwindowed, limits.layer_groups),
        (snapshot_offers(limits, 0, tokens, ids.__next__), SPEC.windowed, limits.window_groups),
    ]
    sent = sum(
        offer.valid_tokens * offer.groups / groups * spec.bytes_per_token
        for offers, spec, groups in bytes_of
        for offer in offers
    )
    assert sent == pytest.approx(sent_part(GPT, tokens) * tokens * SPEC.bytes_per_token)


def test_a_model_whose_layers_are_alike_sends_and_holds_all() -> None:
    llama = LLAMA_70B
    assert sent_part(llama, 1000) == 1
    assert held_bytes(llama, "bfloat16", 1000, 100) == 1000 * llama.kv_bytes_per_token()
    assert "of it in windowed layers" not in dict(kv_facts(llama, "bfloat16", "none", 1000, 1.0))
    said = dict(kv_facts(GPT, "bfloat16", "none", 32_768, 1.0, 64))
    assert said["of it in windowed layers"] == "24,576 bytes, of 128 positions"
    assert "0.50 transferred" in said["of 32,768 tokens"]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-4-31b", "llama-3.1-8b"])
def test_the_simulator_transfers_of_a_prompt_what_the_facts_say(name: str) -> None:
    shape = geometry(name)
    costs = ModelCosts(CostModel(shape, H100, Layout()))
    for tokens in (1, 100, 5_000):
        expected = tokens * wire_bytes_per_token(shape, 2) * sent_part(shape, tokens)
        assert costs.wire_bytes(tokens) == pytest.approx(expected)
