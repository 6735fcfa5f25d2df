"""Fields of config.json as transformers' configurations have them (config_fields.json, which
`tests/golden/make_config_fields.py` makes): a value that means what its absence means refuses no
model, and a field may have each of its names."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from models.catalog import FAMILIES, read_config
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig
from models.safetensors_files import SafetensorsFiles, StoredTensor, text_names
from tests.models.configs import Fields, not_refused

HERE = Path(__file__).parent
TABLE = json.loads((HERE / "config_fields.json").read_text())["families"]
# Families of published code, for which transformers has no configuration.
WITHOUT_CLASS = {"kimi_k2", "minimax_m1", "minimax_text_01"}
# Fields that a fixture states under other names, and names of sizes that follow from others.
STATED_OTHERWISE = {
    ("kimi_linear", "max_position_embeddings"),
    ("kimi_linear", "n_group"),
    ("kimi_linear", "num_experts_per_tok"),
    ("kimi_linear", "num_local_experts"),
    ("step3p5", "num_local_experts"),
}
DERIVED = {("glm4_moe_lite", "head_dim"), ("qwen3_5_text", "head_dim")}
# Parameters and those of a token, in billions, of models whose sizes are the defaults.
SIZES = {
    "ernie4_5_moe": (21.8, 3.4),
    "iquestcoder": (39.8, 39.8),
    "laguna": (33.2, 2.8),
    "mellum": (12.1, 2.4),
    "sarvam_mla": (106.0, 12.4),
    "sarvam_moe": (32.2, 4.5),
    "solar_open": (102.7, 12.1),
    "youtu": (2.0, 2.0),
}


def _fixtures() -> dict[str, Fields]:
    """The fields of one golden checkpoint of each family."""
    found: dict[str, Fields] = {}
    for path in sorted((HERE.parent / "golden").glob("*/expected.npz")):
        fields = HfConfig.from_directory(path.parent).fields
        found.setdefault(str(fields["model_type"]), dict(fields))
    return found


FIXTURES = _fixtures()


def _read(fields: Fields) -> DecoderConfig:
    return read_config(HfConfig(fields))


def test_the_table_has_every_family() -> None:
    assert TABLE.keys() == FAMILIES.keys() - WITHOUT_CLASS


@pytest.mark.parametrize("family", TABLE)
def test_a_field_with_its_default_means_what_its_absence_means(family: str) -> None:
    fields, names = FIXTURES[family], TABLE[family]["names"]
    expected = _read(fields)
    stated = {usual for own, usual in names.items() if own in fields}
    stated |= {own for own, usual in names.items() if usual in fields}
    for field, default in TABLE[family]["fields"].items():
        if field in stated or (family, field) in STATED_OTHERWISE:
            continue
        if field not in fields:
            assert _read(fields | {field: default}) == expected, field
        elif fields[field] == default:
            less = {name: value for name, value in fields.items() if name != field}
            assert _read(less) == expected, field


@pytest.mark.parametrize("family", [family for family in TABLE if TABLE[family]["names"]])
def test_a_field_may_have_each_of_its_names(family: str) -> None:
    fields = FIXTURES[family]
    expected = _read(fields)
    for own, usual in TABLE[family]["names"].items():
        if usual in fields and (family, own) not in DERIVED:
            renamed = {name: value for name, value in fields.items() if name != usual}
            assert _read(renamed | {own: fields[usual]}) == expected, own


def test_defaults_of_a_family_are_the_sizes_of_its_published_model() -> None:
    found = {}
    for family in SIZES:
        geometry = _read({"model_type": family} | TABLE[family]["fields"]).cost_geometry(family)
        sizes = geometry.parameters, geometry.active_parameters
        found[family] = tuple(round(each / 1e9, 1) for each in sizes)
    assert found == SIZES


def _refused() -> Iterable[tuple[str, Fields]]:
    qwen = FIXTURES["qwen3_5_text"]
    yield "output_gate_type must be 'silu' or 'swish'", qwen | {"output_gate_type": "sigmoid"}
    cohere = FIXTURES["cohere2_moe"]
    yield "use_qk_norm must be false", cohere | {"use_qk_norm": True}
    yield "must be 'average' or 'sum'", cohere | {"shared_expert_combination_strategy": "max"}
    yield "expert_selection_fn must be", cohere | {"expert_selection_fn": "relu"}
    laguna = FIXTURES["laguna"]
    yield "gating must be true", laguna | {"gating": "other"}
    yield "one number to all of 3", laguna | {"num_attention_heads_per_layer": [4, 6, 8]}
    yield "must be multiples of", laguna | {"num_attention_heads_per_layer": [4, 5, 5]}
    yield "must be 0.0", laguna | {"moe_router_logit_softcapping": 30.0}
    yield "num_local_experts must equal", FIXTURES["mixtral"] | {"num_experts": 5}
    hunyuan = FIXTURES["hunyuan_v1_moe"]
    yield "moe_topk must be the same in all", hunyuan | {"moe_topk": [2, 1]}
    yield "moe_intermediate_size must be 24", hunyuan | {"moe_intermediate_size": 12}
    yield "use_cla=True", hunyuan | {"use_cla": True}
    yield "use_bias must be false", FIXTURES["ernie4_5_moe"] | {"use_bias": True}
    yield "layer_rope_theta must have", FIXTURES["granite_swa"] | {"layer_rope_theta": [1.0]}
    yield (
        "rope_parameters must be objects under",
        FIXTURES["mellum"] | {"rope_parameters": {"x": 1}},
    )
    yield "first_k_dense_replace=1", FIXTURES["solar_open"] | {"first_k_dense_replace": 1}


def test_another_form_is_refused_by_name() -> None:
    assert not_refused(_read, _refused()) == []


def test_published_forms_of_fields_are_read() -> None:
    for kind in (None, "silu", "swish"):  # Qwen3.8
        fields = FIXTURES["qwen3_5_text"]
        assert _read(fields | {"output_gate_type": kind}) == _read(fields)
    fields = FIXTURES["exaone_moe"]  # K-EXAONE
    less = {name: value for name, value in fields.items() if name != "mlp_layer_types"}
    more = {"is_moe_layer": [False, True, True], "scoring_func": "sigmoid"}
    more |= {"first_last_k_dense_replace": 1, "architectures": ["ExaoneMoEForCausalLM"]}
    assert _read(less | more | {"topk_method": "noaux_tc"}) == _read(fields)
    fields = FIXTURES["hunyuan_v1_moe"]  # Hunyuan-A13B
    lists = {"num_experts": 8, "moe_topk": [2, 2], "num_shared_expert": [1, 1]}
    assert _read(fields | lists | {"moe_intermediate_size": [24, 24]}) == _read(fields)
    fields = FIXTURES["internlm3"]
    biases = ("attention_bias", "mlp_bias")
    less = {name: value for name, value in fields.items() if name not in biases}
    assert _read(less | {"qkv_bias": True, "bias": True}) == _read(fields)


def test_a_text_part_is_read_as_the_family_that_it_is() -> None:
    """Models whose encoder is not loaded, under the names of their published configurations."""
    for outer, kind, called, architecture in (
        ("glm46v", "glm4v_text", "glm4v_text", "Glm46VForConditionalGeneration"),
        ("exaone4_5", "exaone4", "exaone4_5_text", "Exaone4_5_ForConditionalGeneration"),
        ("exaone4_5", "exaone4", "exaone4", "Exaone4_5_ForConditionalGeneration"),
    ):
        text = FIXTURES[kind]
        whole = {"model_type": outer, "architectures": [architecture], "vision_config": {}}
        tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
        assert _read(whole | tied | {"text_config": text | {"model_type": called}}) == _read(text)


def test_the_text_part_of_qwen3_omni_is_that_of_its_thinker() -> None:
    thinker = json.loads((HERE.parent / "golden" / "qwen3_omni" / "config.json").read_text())
    beside = {"talker_config": {}, "code2wav_config": {}}
    whole: Fields = {"model_type": "qwen3_omni_moe", "thinker_config": thinker, **beside}
    whole["architectures"] = ["Qwen3OmniMoeForConditionalGeneration"]
    assert _read(whole) == _read(FIXTURES["qwen3_omni_moe_text"])
    tensor = StoredTensor(HERE, "F32", (1,), 0, 4)
    read = ("thinker.model.norm.weight", "thinker.lm_head.weight")
    aside = ("thinker.visual.x", "thinker.audio_tower.x", "talker.model.norm.weight", "code2wav.x")
    files = SafetensorsFiles(dict.fromkeys(text_names((*read, *aside)), tensor))
    assert files.shapes().keys() == {"model.norm.weight", "lm_head.weight"}
