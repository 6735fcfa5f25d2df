"""Granite 3, dense: Llama with scales on embeddings, residuals, attention scores and logits."""

from dataclasses import replace

from models import llama
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig


def read_config(hf: HfConfig) -> DecoderConfig:
    config = llama.read_config(hf)
    return replace(
        config,
        attention=replace(config.attention, scale=hf.number("attention_multiplier", 1.0)),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        residual_scale=hf.number("residual_multiplier", 1.0),
        logits_divisor=hf.number("logits_scaling", 1.0),
    )
