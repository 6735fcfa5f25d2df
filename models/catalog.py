"""Catalogue of the supported model families: maps the `model_type` of config.json to the function
that reads the family's configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from models import (
    apertus,
    cohere,
    deepseek,
    exaone4,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    hy_v3,
    kimi_linear,
    lfm2,
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
    """A model family. `architecture` is the name under `architectures` in config.json.
    `read_config` converts the fields of config.json to the model's configuration."""

    architecture: str
    read_config: Callable[[HfConfig], DecoderConfig]


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama.read_config),
    "llama4_text": Family("Llama4ForCausalLM", llama4.read_config),
    "apertus": Family("ApertusForCausalLM", apertus.read_config),
    "arcee": Family("ArceeForCausalLM", llama.read_arcee_config),
    "ernie4_5": Family("Ernie4_5ForCausalLM", llama.read_ernie_config),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", llama.read_hunyuan_config),
    "cohere": Family("CohereForCausalLM", cohere.read_config),
    "cohere2": Family("Cohere2ForCausalLM", cohere.read_2_config),
    "exaone4": Family("Exaone4ForCausalLM", exaone4.read_config),
    "mistral": Family("MistralForCausalLM", mistral.read_config),
    "mixtral": Family("MixtralForCausalLM", mixtral.read_config),
    "qwen2": Family("Qwen2ForCausalLM", qwen2.read_config),
    "qwen2_vl_text": Family("Qwen2VLForCausalLM", qwen2.read_vl_config),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForCausalLM", qwen2.read_vl_config),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qwen2_moe.read_config),
    "qwen3": Family("Qwen3ForCausalLM", qwen3.read_config),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe.read_config),
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
    "granite": Family("GraniteForCausalLM", granite.read_config),
    "granitemoe": Family("GraniteMoeForCausalLM", granite.read_moe_config),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", granite.read_4_config),
    "phi3": Family("Phi3ForCausalLM", phi3.read_config),
    "glm": Family("GlmForCausalLM", glm4.read_glm_config),
    "glm4": Family("Glm4ForCausalLM", glm4.read_config),
    "glm4v_text": Family("Glm4vForCausalLM", glm4.read_vl_config),
    "dots1": Family("Dots1ForCausalLM", glm4_moe.read_dots_config),
    "glm4_moe": Family("Glm4MoeForCausalLM", glm4_moe.read_config),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek.read_v2_config),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek.read_v3_config),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", deepseek.read_v32_config),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", deepseek.read_dsa_config),
    "kimi_k2": Family("DeepseekV3ForCausalLM", deepseek.read_v3_config),
    "kimi_linear": Family("KimiLinearForCausalLM", kimi_linear.read_config),
    "lfm2": Family("Lfm2ForCausalLM", lfm2.read_config),
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
    if architectures and family.architecture not in architectures:
        raise hf.error(
            "architectures",
            f"must hold {family.architecture!r} for model_type {kind!r}",
            "only causal language models are served",
        )
    config = family.read_config(hf)
    stored_quantization(hf)
    hf.refuse_unread()
    vision = read_vision(hf, config.width, config.vocabulary)
    if vision is None:
        return config
    config = replace(config, vision=vision)
    return config.with_sections(spatial_sections(hf)) if vision.spatial else config
