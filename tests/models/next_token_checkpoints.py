"""Checkpoints with a random next-token layer, and random EAGLE-3 heads, made for the small
checkpoints of tests/golden."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def with_next_token_layer(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint with a next-token layer under the names of DeepSeek-V3, in the form of
    its last layer."""
    directory = Path(shutil.copytree(source, folder / "drafting"))
    fields = json.loads((directory / "config.json").read_text())
    last, width = fields["num_hidden_layers"] - 1, fields["hidden_size"]
    stored = load_file(directory / "model.safetensors")
    random = np.random.default_rng(7)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + random.standard_normal(shape) * scale).astype(np.float32)

    prefix = f"model.layers.{last}."
    own = {
        name.removeprefix(prefix): normal(
            *tensor.shape, scale=tensor.shape[-1] ** -0.5, mean=float(tensor.ndim == 1)
        )
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }
    own |= {
        "enorm.weight": normal(width, scale=0.1, mean=1.0),
        "hnorm.weight": normal(width, scale=0.1, mean=1.0),
        "eh_proj.weight": normal(width, 2 * width, scale=(2 * width) ** -0.5),
        "shared_head.norm.weight": normal(width, scale=0.1, mean=1.0),
        # Checkpoints also hold copies of embedding and head, which are not read.
        "embed_tokens.weight": stored["model.embed_tokens.weight"],
    }
    added = {f"model.layers.{last + 1}.{name}": tensor for name, tensor in own.items()}
    save_file(stored | added, directory / "model.safetensors")
    fields["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def eagle_head(source: Path, folder: Path, least: int = 3) -> Path:
    """A random EAGLE-3 head for a checkpoint in the published form. It drafts all but the first
    `least` tokens."""
    model = json.loads((source / "config.json").read_text())
    width, ffn, vocabulary = (
        model[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    size, drafts, random = width // heads, vocabulary - least, np.random.default_rng(8)

    def matrix(out: int, into: int) -> np.ndarray:
        return (random.standard_normal((out, into)) * into**-0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * random.standard_normal(width)).astype(np.float32)

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {f"midlayer.{name}.weight": norm() for name in norms} | {
        "norm.weight": norm(),
        "fc.weight": matrix(width, 3 * width),
        "midlayer.self_attn.q_proj.weight": matrix(heads * size, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * size, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * size, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, heads * size),
        "midlayer.mlp.gate_proj.weight": matrix(ffn, width),
        "midlayer.mlp.up_proj.weight": matrix(ffn, width),
        "midlayer.mlp.down_proj.weight": matrix(width, ffn),
        "lm_head.weight": matrix(drafts, width),
        "d2t": np.full(drafts, least, np.int64),
        "t2d": np.arange(vocabulary) >= least,
    }
    directory = folder / "head"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "draft_vocab_size": drafts,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    return directory
