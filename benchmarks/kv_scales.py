"""How much precision do scales preserve if KV is stored in fp8?

    python -m benchmarks.kv_scales --prompts=24 --name=kv_scales

Measures the shipped models, and four models derived from the shipped Llama. In the first, keys are
256 times as large and queries correspondingly smaller. In the second, values are smaller by 2^-14.
In the other two, keys have biases of +-1000 in two pairs of channels of each head, as in some Qwen2
models; queries are unchanged, or smaller by 2^-8 (scores as after training). Each model is compared
with itself without rounding of KV, over held-out text with teacher forcing: root mean square error
of logits relative to their deviation, Kullback-Leibler divergence, and how often the most likely
token is the same. KV is in e4m3 without scales, and with the scales that `jdisagg calibrate_kv`
would choose."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import load_file, save_file

from benchmarks.measure import save
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KV_SCALES_FILE
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.kv_pages import as_kept, as_read
from launch.calibrate_kv import DEFAULT_TEXT, sequences
from models.checkpoint import load_config, load_model
from models.kv_calibration import largest_kept
from models.kv_scales import chosen_scales, write_kv_scales
from models.tokenizer import Tokenizer
from tools.tiny_models.corpus import document

_PROMPTS = flags.DEFINE_integer("prompts", 24, "Texts that each model is judged on.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny"
PROMPT_TOKENS, CALIBRATION_TOKENS = 96, 2048
Tensors = dict[str, np.ndarray]


def larger_keys(tensors: Tensors) -> None:
    _multiply(tensors, k_proj=2.0**8, q_proj=2.0**-8)


def smaller_values(tensors: Tensors) -> None:
    _multiply(tensors, v_proj=2.0**-14, o_proj=2.0**14)


def biased(shrunk: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        config, random = load_config(TINY / "llama"), np.random.default_rng(0)
        attention = config.attention
        kv, size = attention.kv_heads, attention.head_dim
        heads = attention.query_heads
        sizes = {"q": heads * size, "k": kv * size, "v": kv * size, "o": config.width}
        for layer in range(len(config.layers)):
            prefix = f"model.layers.{layer}.self_attn."
            for side, count in sizes.items():
                tensors[f"{prefix}{side}_proj.bias"] = np.zeros(count, np.float32)
            keys = tensors[f"{prefix}k_proj.bias"].reshape(kv, size)
            queries = tensors[f"{prefix}q_proj.weight"].reshape(kv, heads // kv, size, -1)
            for head in range(kv):
                pairs = random.permutation(size // 2)[:2]
                channels = np.concatenate((pairs, pairs + size // 2))
                keys[head, channels] = random.choice([-1000.0, 1000.0], channels.size)
                queries[head, :, channels] *= shrunk

    return change


# base, change, fields of config.json
MODELS: dict[str, tuple[str, Callable[[Tensors], None], dict[str, object]]] = {
    "llama": ("llama", lambda tensors: None, {}),
    "qwen3_moe": ("qwen3_moe", lambda tensors: None, {}),
    "llama, keys * 2^8": ("llama", larger_keys, {}),
    "llama, values * 2^-14": ("llama", smaller_values, {}),
    "llama, biases, small queries": ("llama", biased(2.0**-8), {"attention_bias": True}),
    "llama, biases, queries as they were": ("llama", biased(1.0), {"attention_bias": True}),
}


def _multiply(tensors: Tensors, **factors: float) -> None:
    for name in tensors:
        for part, factor in factors.items():
            if f"{part}.weight" in name:
                tensors[name] = tensors[name] * np.float32(factor)


def made(name: str, folder: Path) -> Path:
    base, change, fields = MODELS[name]
    directory = Path(shutil.copytree(TINY / base, folder / name.replace(" ", "_")))
    path = directory / "model.safetensors"
    tensors = {key: np.array(values) for key, values in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))
    return directory


def logits(directory: Path, texts: Sequence[Sequence[int]], kv_dtype: str) -> np.ndarray:
    """Returns logits, float32 [texts, T, V]."""
    model = load_model(directory, Layout(), jax.devices()[:1], kv_dtype=kv_dtype).model
    attend: Callable[..., jax.Array] = _attend_to_kept if kv_dtype else dense_causal_attend
    positions_T = jnp.arange(PROMPT_TOKENS, dtype=jnp.int32)
    run = jax.jit(lambda ids_T: model(ids_T, positions_T, attend))
    return np.stack([np.asarray(run(jnp.asarray(text, jnp.int32))) for text in texts])


def _attend_to_kept(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: Any, **how: Any) -> jax.Array:
    k_TKH, v_TKH = (
        as_read(as_kept(part, jnp.dtype(jnp.uint8)), part.dtype) for part in (k_TKH, v_TKH)
    )
    return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)


def difference(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    ours, theirs = (np.asarray(jax.nn.log_softmax(x, axis=-1)) for x in (found, exact))
    return {
        "logit_error": float(np.sqrt(np.mean((found - exact) ** 2)) / exact.std()),
        "divergence": float((np.exp(theirs) * (theirs - ours)).sum(axis=-1).mean()),
        "same_choice": float((found.argmax(axis=-1) == exact.argmax(axis=-1)).mean()),
    }


def judged(directory: Path) -> dict[str, object]:
    tokenizer = Tokenizer.from_directory(directory)
    documents = (document(0, index, held_out=True) for index in range(4 * _PROMPTS.value))
    ids = (tokenizer.encode(text)[:PROMPT_TOKENS] for text in documents)
    texts = [text for text in ids if len(text) == PROMPT_TOKENS][: _PROMPTS.value]
    exact = logits(directory, texts, "")
    without = difference(logits(directory, texts, "fp8"), exact)
    loaded = load_model(directory, Layout(), jax.devices()[:1])
    default = DEFAULT_TEXT.read_text(encoding="utf-8")
    largest = largest_kept(loaded, sequences(tokenizer, default, CALIBRATION_TOKENS))
    scales = [{name: chosen_scales(values) for name, values in layer.items()} for layer in largest]
    write_kv_scales(directory / KV_SCALES_FILE, loaded.model.config, scales, "a benchmark")
    return {
        "largest": {
            name: float(max(layer[name].max() for layer in largest)) for name in ("k", "v")
        },
        "without_scales": without,
        "with_scales": difference(logits(directory, texts, "fp8"), exact),
    }


def main(_: list[str]) -> None:
    figures: dict[str, object] = {"prompts": _PROMPTS.value, "prompt_tokens": PROMPT_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            figures[name] = judged(made(name, Path(folder)))
            print(name, figures[name], flush=True)
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
