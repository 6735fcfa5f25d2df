"""Facts of the guide: KV as `jdisagg kv_calculator` prints it, and a roofline that counts the work
which the sizes of a model need."""

import re
from functools import cache

import pytest

from jdisagg.costs.catalog import CATALOG, geometry
from jdisagg.costs.hardware import HARDWARE
from jdisagg.costs.kv_facts import bytes_text, kv_formula
from jdisagg.guide.facts import (
    GUIDE_HARDWARE,
    GUIDE_LINKS,
    GUIDE_MODELS,
    FactsQuestion,
    GuideFacts,
    facts,
)
from tests.launch.script_ends import ends

ALL = [(model, card) for model in GUIDE_MODELS for card in GUIDE_HARDWARE]


@cache
def known(model: str, hardware: str = "h100") -> GuideFacts:
    return facts(FactsQuestion(model, hardware))


def test_kv_and_links_are_what_the_kv_calculator_prints() -> None:
    models, asked = ("deepseek-v3", "gpt-oss-120b"), "--prompt_tokens=16384"
    links = f"--links={','.join(GUIDE_LINKS)}"
    lines = [
        (f"--model={one}", asked, links, f"--parallel_links={known(one).parallel_links}")
        for one in models
    ]
    for model, end in zip(models, ends("kv_calculator", *lines), strict=True):
        found, printed = known(model), end.out
        (length,) = (one for one in found.lengths if one.prompt_tokens == 16384)
        assert f"{found.kv_bytes_per_token:,} bytes ({found.formula})" in printed
        kv = re.escape(bytes_text(length.kv_bytes))
        assert re.search(rf"KV of 16,384 tokens +{kv} *\n", printed)
        rows = {line.split()[0]: line.split()[3] for line in printed.splitlines() if "%" in line}
        assert rows == {link.link: f"{1e3 * link.seconds:,.2f}" for link in length.links}


@pytest.mark.parametrize("model", CATALOG)
def test_the_formula_of_kv_multiplies_to_the_bytes(model: str) -> None:
    shape = CATALOG[model]
    text = re.sub(
        r"[a-zA-Z]+", lambda word: "*" if word[0] == "x" else "", kv_formula(shape, "bfloat16")
    )
    assert eval(text) == shape.kv_bytes_per_token("bfloat16")


@pytest.mark.parametrize(("model", "card"), ALL)
def test_every_choice_of_the_page_has_facts_below_the_roof(model: str, card: str) -> None:
    found = known(model, card)
    roofline, described = found.roofline, HARDWARE[card]
    assert roofline.peak_flops == described.peak_flops
    for points in (roofline.prefill, roofline.decode):
        for point in points:
            roof = min(roofline.peak_flops, point.intensity * roofline.bytes_per_second)
            assert 0 < point.flops_per_second <= roof
    assert found.lengths[-1].prompt_tokens <= geometry(model).context_tokens


def test_decode_reads_each_weight_for_two_operations_and_prefill_for_many() -> None:
    """Of a dense model in two bytes: 2 FLOP a weight and token, 2 bytes a weight and step."""
    roofline = known("llama-3.1-8b").roofline
    shape = geometry("llama-3.1-8b")
    weights = shape.parameters - shape.vocabulary * shape.width  # the embedding is looked up
    one, *_, many = roofline.decode
    attention = 4 * 32 * 128 * 32 * roofline.context_tokens  # FLOP: heads, head size, layers
    kv = 131_072 * roofline.context_tokens
    expected = (2 * weights + attention) / (2 * weights + kv)
    assert one.intensity == pytest.approx(expected, rel=0.01)
    assert one.bound == many.bound == "memory" and not many.fits
    assert roofline.prefill[-1].intensity > 500 and roofline.prefill[-1].bound == "compute"


def test_a_transfer_is_hidden_only_where_later_chunks_compute() -> None:
    found = known("llama-3.1-70b")
    (short,) = (one for one in found.lengths if one.prompt_tokens == 4096)
    (long,) = (one for one in found.lengths if one.prompt_tokens == 32768)
    assert all(link.exposed_seconds == link.seconds for link in short.links)
    fast, slow = long.links[0], long.links[-1]
    assert fast.exposed_seconds == pytest.approx(fast.seconds / 4, rel=0.01)
    assert slow.exposed_seconds >= slow.seconds - long.prefill_seconds
