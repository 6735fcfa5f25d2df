"""Writes the measured model as a Hugging Face folder, which all engines can read: config.json,
random float32 weights from one seed, and a tokenizer whose words w3, w4, ... have the ids 3, 4, ...

Matrices have variance 1 / fan-in, the embedding has standard deviation 0.02, and norms are one, as
in `models.decoder.init_model`. A list of ids decodes to a text that encodes to the same ids.
Benchmark clients that send text therefore send exactly the intended number of tokens."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.plain_loop import MEASURED_MODEL

FOLDER = Path("~/.cache/jdisagg/measured_model").expanduser()
# Three of four layers keep a state (gated delta net) instead of KV.
HYBRID_MODEL: dict[str, object] = {
    **MEASURED_MODEL,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": list(range(int(MEASURED_MODEL["num_hidden_layers"]))),
    "num_experts": 0,
    "partial_rotary_factor": 0.25,
}
SPECIAL = ("<unk>", "<s>", "</s>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def measured_checkpoint(
    folder: Path = FOLDER, config: dict[str, object] = MEASURED_MODEL, seed: int = 0
) -> Path:
    """Returns the folder. Writes the checkpoint if it does not exist yet."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        new.mkdir()
        save_file(_tensors(config, seed), new / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(new, int(str(config["vocab_size"])), config["max_position_embeddings"])
        special = {"bos_token_id": SPECIAL.index("<s>"), "eos_token_id": SPECIAL.index("</s>")}
        _write(new / "generation_config.json", special)
        _write(new / "config.json", {**config, **special, "torch_dtype": "float32"})
        os.replace(new, folder)
    return folder


def _tensors(config: dict[str, object], seed: int) -> dict[str, np.ndarray]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    width, heads, kv_heads, head = (int(str(config[name])) for name in names)
    ffn, vocabulary = int(str(config["intermediate_size"])), int(str(config["vocab_size"]))
    rng = np.random.default_rng(seed)

    def kernel(rows: int, columns: int, deviation: float | None = None) -> np.ndarray:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(columns**-0.5 if deviation is None else deviation)

    hybrid = config["model_type"] == "qwen3_next"
    # The hybrid's norms multiply by 1 + weight, and its queries have a gate of the same width.
    one = (np.zeros if hybrid else np.ones)(width, np.float32)
    named = {"model.embed_tokens.weight": kernel(vocabulary, width, 0.02)}
    named |= {"model.norm.weight": one, "lm_head.weight": kernel(vocabulary, width)}
    for number in range(int(str(config["num_hidden_layers"]))):
        if hybrid and (number + 1) % int(str(config["full_attention_interval"])):
            mixer = _delta_net(config, kernel, rng)
        else:
            mixer = {
                "self_attn.q_proj.weight": kernel((1 + hybrid) * heads * head, width),
                "self_attn.k_proj.weight": kernel(kv_heads * head, width),
                "self_attn.v_proj.weight": kernel(kv_heads * head, width),
                "self_attn.o_proj.weight": kernel(width, heads * head),
            }
            if hybrid:
                norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
                mixer |= dict.fromkeys(norms, np.zeros(head, np.float32))
        layer = {
            "input_layernorm.weight": one,
            "post_attention_layernorm.weight": one,
            "mlp.gate_proj.weight": kernel(ffn, width),
            "mlp.up_proj.weight": kernel(ffn, width),
            "mlp.down_proj.weight": kernel(width, ffn),
        }
        named |= {f"model.layers.{number}.{name}": v for name, v in {**layer, **mixer}.items()}
    return named


def _delta_net(
    config: dict[str, object], kernel: Callable[..., np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    names = ("key_heads", "value_heads")
    k_heads, v_heads = (int(str(config[f"linear_num_{name}"])) for name in names)
    k_head, v_head = (int(str(config[f"linear_{name}_head_dim"])) for name in ("key", "value"))
    width, taps = int(str(config["hidden_size"])), int(str(config["linear_conv_kernel_dim"]))
    mixed = 2 * k_heads * k_head + v_heads * v_head
    tensors = {
        "in_proj_qkvz.weight": kernel(mixed + v_heads * v_head, width),
        "in_proj_ba.weight": kernel(2 * v_heads, width),
        "conv1d.weight": kernel(mixed, taps)[:, None],
        "A_log": np.log(rng.uniform(1, 16, v_heads)).astype(np.float32),
        "dt_bias": np.ones(v_heads, np.float32),
        "norm.weight": np.ones(v_head, np.float32),
        "out_proj.weight": kernel(width, v_heads * v_head),
    }
    return {f"linear_attn.{name}": value for name, value in tensors.items()}


def _write_tokenizer(folder: Path, vocabulary: int, context: object) -> None:
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), vocabulary))]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Each token is " w123" in a text: pieces of a stream join without knowing their neighbours.
    tokenizer.decoder = decoders.Replace("w", " w")
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
