"""Writes a trained tiny model as a Hugging Face folder: config.json, generation_config.json,
model.safetensors and tokenizer files. Names and shapes are those of transformers' LlamaForCausalLM
and Qwen3MoeForCausalLM: kernels [out, in], separate experts, float32."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tools.tiny_models.network import Block, TinyNetwork, TinyShape
from tools.tiny_models.tokenizer import BEGIN_ID, END_IDS, write_tokenizer


def write_checkpoint(network: TinyNetwork, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(network), folder / "model.safetensors", metadata={"format": "pt"})
    write_beside(config(network.shape), tokenizer, folder)


def write_beside(config: dict[str, object], tokenizer: Tokenizer, folder: Path) -> None:
    """Writes all files of a checkpoint but the weights."""
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"bos_token_id": BEGIN_ID, "eos_token_id": list(END_IDS)}
    )
    write_tokenizer(tokenizer, folder, int(str(config["max_position_embeddings"])))


def config(shape: TinyShape) -> dict[str, object]:
    """Returns the fields of config.json for a model of this shape."""
    common: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "model_type": shape.family,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_IDS[0],
        "torch_dtype": "float32",
    }
    if not shape.experts:
        return common | {"mlp_bias": False}
    return common | {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def tensors(network: TinyNetwork) -> dict[str, np.ndarray]:
    """Returns all weights under the tensor names that transformers uses."""
    named = {
        "model.embed_tokens.weight": _array(network.embedding[...]),
        "model.norm.weight": _array(network.norm[...]),
    }
    for number, block in enumerate(network.blocks):
        named |= {
            f"model.layers.{number}.{name}": tensor
            for name, tensor in _block_tensors(block).items()
        }
    return named


def _block_tensors(block: Block) -> dict[str, np.ndarray]:
    named = {
        "input_layernorm.weight": _array(block.attention_norm[...]),
        "post_attention_layernorm.weight": _array(block.mlp_norm[...]),
    }
    named |= {
        f"self_attn.{name}_proj.weight": _array(getattr(block, name)[...].T)
        for name in ("q", "k", "v", "o")
    }
    gate, up, down = (_array(kernel[...].T) for kernel in (block.gate, block.up, block.down))
    if block.router is None or block.q_norm is None or block.k_norm is None:
        return named | {
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": down,
        }
    named |= {
        "self_attn.q_norm.weight": _array(block.q_norm[...]),
        "self_attn.k_norm.weight": _array(block.k_norm[...]),
    }
    named["mlp.gate.weight"] = _array(block.router[...].T)
    for expert in range(block.shape.experts):
        own = slice(expert * block.shape.expert_ffn, (expert + 1) * block.shape.expert_ffn)
        kernels = {"gate_proj": gate[own], "up_proj": up[own], "down_proj": down[:, own]}
        named |= {
            f"mlp.experts.{expert}.{name}.weight": np.ascontiguousarray(kernel)
            for name, kernel in kernels.items()
        }
    return named


def _array(value: object) -> np.ndarray:
    # safetensors writes a transposed view's memory as it lies: it must be contiguous.
    return np.ascontiguousarray(np.asarray(value, dtype=np.float32))


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
