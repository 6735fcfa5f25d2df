"""The families we serve: config.json's `model_type` -> how to read its config and where its tensors
are named."""

from collections.abc import Callable
from dataclasses import dataclass

from models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Family:
    """`architecture` is the class name that the family's checkpoints state."""

    architecture: str
    read_config: Callable[[HfConfig], DecoderConfig]


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama.read_config),
    "mistral": Family("MistralForCausalLM", mistral.read_config),
    "mixtral": Family("MixtralForCausalLM", mixtral.read_config),
    "qwen2": Family("Qwen2ForCausalLM", qwen2.read_config),
    "qwen3": Family("Qwen3ForCausalLM", qwen3.read_config),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe.read_config),
}


def read_config(hf: HfConfig) -> DecoderConfig:
    """The configuration of a supported model; anything else is refused by name."""
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
    hf.refuse_unread()
    return config
