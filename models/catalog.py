"""Catalogue of the supported model families: maps the `model_type` of config.json to the function
that reads the family's configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from models import (
    afmoe,
    apertus,
    cohere,
    deepseek,
    ernie_moe,
    exaone4,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan_moe,
    hy_v3,
    kimi_linear,
    laguna,
    lfm2,
    ling,
    llama,
    llama4,
    mimo_v2,
    minimax,
    minimax_m2,
    minimax_m3,
    ministral,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    seed_oss,
    smollm3,
    step3p5,
)
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig
from models.quantization_config import stored_quantization
from models.vision_config import read_vision, spatial_sections


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. `architecture` is the name under `architectures` in config.json, in any case
    of letters, and `saved` the name that transformers writes, if it is another. `read_config`
    converts the fields of config.json to the model's configuration."""

    architecture: str
    read_config: Callable[[HfConfig], DecoderConfig]
    saved: str = ""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama.read_config),
    "llama4_text": Family("Llama4ForCausalLM", llama4.read_config),
    "apertus": Family("ApertusForCausalLM", apertus.read_config),
    "afmoe": Family("AfmoeForCausalLM", afmoe.read_config),
    "arcee": Family("ArceeForCausalLM", llama.read_arcee_config),
    "ernie4_5": Family("Ernie4_5ForCausalLM", llama.read_ernie_config),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", ernie_moe.read_config),
    "internlm3": Family("InternLM3ForCausalLM", llama.read_intern_config, "LlamaForCausalLM"),
    "iquestcoder": Family("IQuestCoderForCausalLM", llama.read_iquest_config, "LlamaForCausalLM"),
    "cwm": Family("CwmForCausalLM", llama.read_cwm_config),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", llama.read_hunyuan_config),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", hunyuan_moe.read_config),
    "cohere": Family("CohereForCausalLM", cohere.read_config),
    "cohere2": Family("Cohere2ForCausalLM", cohere.read_2_config),
    "cohere2_moe": Family("Cohere2MoeForCausalLM", cohere.read_moe_config),
    "exaone4": Family("Exaone4ForCausalLM", exaone4.read_config),
    "exaone_moe": Family("ExaoneMoEForCausalLM", exaone4.read_moe_config),
    "mistral": Family("MistralForCausalLM", mistral.read_config),
    "mixtral": Family("MixtralForCausalLM", mixtral.read_config),
    "qwen2": Family("Qwen2ForCausalLM", qwen2.read_config),
    "qwen2_vl_text": Family("Qwen2VLForCausalLM", qwen2.read_vl_config),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForCausalLM", qwen2.read_vl_config),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qwen2_moe.read_config),
    "qwen3": Family("Qwen3ForCausalLM", qwen3.read_config),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe.read_config),
    "qwen3_omni_moe_text": Family("Qwen3OmniMoeForCausalLM", qwen3_moe.read_omni_config),
    "mellum": Family("MellumForCausalLM", qwen3_moe.read_mellum_config),
    "qwen3_vl_text": Family("Qwen3VLForCausalLM", qwen3_vl.read_config),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeForCausalLM", qwen3_vl.read_moe_config),
    "qwen3_next": Family("Qwen3NextForCausalLM", qwen3_next.read_config),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", qwen3_next.read_dense_config),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", qwen3_next.read_moe_config),
    "ministral": Family("MinistralForCausalLM", ministral.read_config),
    "ministral3": Family("Ministral3ForCausalLM", ministral.read_3_config),
    "smollm3": Family("SmolLM3ForCausalLM", smollm3.read_config),
    "seed_oss": Family("SeedOssForCausalLM", seed_oss.read_config),
    "olmo2": Family("Olmo2ForCausalLM", olmo2.read_config),
    "olmoe": Family("OlmoeForCausalLM", olmo2.read_moe_config),
    "olmo3": Family("Olmo3ForCausalLM", olmo3.read_config),
    "gemma": Family("GemmaForCausalLM", gemma.read_1_config),
    "gemma2": Family("Gemma2ForCausalLM", gemma.read_2_config),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma.read_3_config),
    "gemma4_text": Family("Gemma4ForCausalLM", gemma4.read_config),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", gemma4.read_unified_config),
    "granite": Family("GraniteForCausalLM", granite.read_config),
    "granitemoe": Family("GraniteMoeForCausalLM", granite.read_moe_config),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", granite.read_shared_config),
    "granite_swa": Family("GraniteSWAForCausalLM", granite.read_swa_config),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM", granite.read_moe_swa_config),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", granite.read_4_config),
    "phi3": Family("Phi3ForCausalLM", phi3.read_config),
    "glm": Family("GlmForCausalLM", glm4.read_glm_config),
    "glm4": Family("Glm4ForCausalLM", glm4.read_config),
    "glm4v_text": Family("Glm4vForCausalLM", glm4.read_vl_config),
    "dots1": Family("Dots1ForCausalLM", glm4_moe.read_dots_config),
    "glm4_moe": Family("Glm4MoeForCausalLM", glm4_moe.read_config),
    "glm4v_moe_text": Family("Glm4vMoeForCausalLM", glm4_moe.read_vl_config),
    "solar_open": Family("SolarOpenForCausalLM", glm4_moe.read_solar_config),
    "sarvam_moe": Family("SarvamMoEForCausalLM", glm4_moe.read_sarvam_config, "Glm4MoeForCausalLM"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek.read_v2_config),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek.read_v3_config),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", deepseek.read_v32_config),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", deepseek.read_dsa_config),
    "sarvam_mla": Family(
        "SarvamMLAForCausalLM", deepseek.read_sarvam_config, "DeepseekV3ForCausalLM"
    ),
    "youtu": Family("YoutuForCausalLM", deepseek.read_youtu_config),
    "kimi_k2": Family("DeepseekV3ForCausalLM", deepseek.read_v3_config),
    "kimi_linear": Family("KimiLinearForCausalLM", kimi_linear.read_config),
    "laguna": Family("LagunaForCausalLM", laguna.read_config),
    "lfm2": Family("Lfm2ForCausalLM", lfm2.read_config),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", lfm2.read_moe_config),
    "lfm3": Family("Lfm3ForCausalLM", lfm2.read_3_config),
    "bailing_hybrid": Family(
        "BailingMoeV3ForCausalLM", ling.read_config, "BailingHybridForCausalLM"
    ),
    "mistral4": Family("Mistral4ForCausalLM", deepseek.read_mistral4_config),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", deepseek.read_flash_config),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss.read_config),
    "hy_v3": Family("HYV3ForCausalLM", hy_v3.read_config),
    "nemotron_h": Family("NemotronHForCausalLM", nemotron_h.read_config),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", mimo_v2.read_config),
    "step3p5": Family("Step3p5ForCausalLM", step3p5.read_config),
    "minimax": Family("MiniMaxForCausalLM", minimax.read_config),
    "minimax_text_01": Family("MiniMaxText01ForCausalLM", minimax.read_published_config),
    "minimax_m1": Family("MiniMaxM1ForCausalLM", minimax.read_published_config),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", minimax_m2.read_config),
    "minimax_m3_vl_text": Family("MiniMaxM3VLForCausalLM", minimax_m3.read_config),
}


def read_config(hf: HfConfig) -> DecoderConfig:
    """Raises CheckpointError, which names the model type, for unsupported models."""
    kind = hf.raw("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise hf.error(
            "model_type", f"must be one of {', '.join(FAMILIES)}", "this family is not supported"
        )
    architectures = hf.names("architectures")
    names = {family.architecture.lower(), family.saved.lower()}
    names |= {name.replace("forcausallm", "model") for name in names}  # without the head
    if architectures and names.isdisjoint(name.lower() for name in architectures):
        raise hf.error(
            "architectures",
            f"must hold {family.architecture!r} for model_type {kind!r}",
            "other architectures of this model_type are not served",
        )
    config = family.read_config(hf)
    stored_quantization(hf)
    hf.refuse_unread()
    vision = read_vision(hf, config.width, config.vocabulary)
    if vision is None:
        return config
    config = replace(config, vision=vision)
    return config.with_sections(spatial_sections(hf)) if vision.spatial else config
