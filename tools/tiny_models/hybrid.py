"""A tiny hybrid model: two layers with Gated DeltaNet and one with attention, as in Qwen3.5. It is
not shipped: benchmarks of drafts measure it."""

from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from models.catalog import read_config
from models.decoder import Decoder, init_model
from models.gated_delta import GatedDeltaNet
from models.hf_config import HfConfig
from tools.tiny_models.export import write_beside
from tools.tiny_models.served import tensors
from tools.tiny_models.tokenizer import BEGIN_ID, END_IDS

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 1280,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "layer_types": [*("linear_attention",) * 2, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 0,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_IDS[0],
    "dtype": "float32",
}


def untrained(config: dict[str, object], seed: int) -> Decoder:
    model = init_model(read_config(HfConfig(config, "the tiny hybrid")), jax.random.key(seed))
    for layer in model.layers:
        if isinstance(layer.attention, GatedDeltaNet):  # some heads remember long
            bias = layer.attention.decay_bias
            bias[...] = jnp.linspace(-5.0, 1.0, bias[...].shape[0])
    return model


def write(model: Decoder, config: dict[str, object], tokenizer: Tokenizer, folder: Path) -> None:
    save_file(tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_beside(config, tokenizer, folder)
