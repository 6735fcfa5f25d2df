"""Checkpoints with a random next-token layer, and random EAGLE-3 heads, made for the small
checkpoints of tests/golden."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

_MTP = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}


def with_next_token_layer(source: Path, folder: Path, *, mtp: bool = False) -> Path:
    """A copy of a checkpoint with a next-token layer under the names of DeepSeek-V3, or of Ling
    3.0, in the form of its last layer. `mtp`: under the names of Qwen3-Next, in the form of its
    last layer with attention; norms multiply by one more than their weight."""
    directory = Path(shutil.copytree(source, folder / "drafting"))
    fields = json.loads((directory / "config.json").read_text())
    text = fields.get("text_config", fields)
    last, width = text["num_hidden_layers"] - 1, text["hidden_size"]
    number, above = last + 1, 0.0 if mtp else 1.0
    if mtp:
        kinds = text["layer_types"]
        last = max(at for at, kind in enumerate(kinds) if kind == "full_attention")
    stored = load_file(directory / "model.safetensors")
    random = np.random.default_rng(7)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + random.standard_normal(shape) * scale).astype(np.float32)

    inner = "model.language_model." if text is not fields else "model."
    prefix = f"{inner}layers.{last}."
    own = {
        name.removeprefix(prefix): normal(
            *tensor.shape, scale=tensor.shape[-1] ** -0.5, mean=above * (tensor.ndim == 1)
        )
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }
    own |= {
        "enorm.weight": normal(width, scale=0.1, mean=above),
        "hnorm.weight": normal(width, scale=0.1, mean=above),
        "eh_proj.weight": normal(width, 2 * width, scale=(2 * width) ** -0.5),
        "shared_head.norm.weight": normal(width, scale=0.1, mean=above),
        # Checkpoints also hold copies of embedding and head, which are not read.
        "embed_tokens.weight": usual_names(stored, number)[f"{inner}embed_tokens.weight"],
    }
    if f"{inner}word_embeddings.weight" in stored:
        own["final_layernorm.weight"] = own.pop("shared_head.norm.weight")
    if mtp:
        del own["embed_tokens.weight"]
        named = {_MTP.get(name, f"layers.0.{name}"): tensor for name, tensor in own.items()}
        added = {f"mtp.{name}": tensor for name, tensor in named.items()}
    else:
        added = {f"model.layers.{number}.{name}": tensor for name, tensor in own.items()}
    save_file(stored | added, directory / "model.safetensors")
    text["mtp_num_hidden_layers" if mtp else "num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def usual_names(stored: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """The tensors, with layer `number`, a next-token layer, under the names of DeepSeek-V3."""
    ling = (("word_embeddings", "embed_tokens"), ("final_layernorm", "shared_head.norm"))
    for theirs, ours in ling:
        stored = {name.replace(theirs, ours): tensor for name, tensor in stored.items()}
    usual = {f"mtp.{theirs}": ours for ours, theirs in _MTP.items()}
    return {
        f"model.layers.{number}.{usual.get(name, name.removeprefix('mtp.layers.0.'))}"
        if name.startswith("mtp.")
        else name: tensor
        for name, tensor in stored.items()
    }


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
