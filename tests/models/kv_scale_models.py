"""Models with KV in fp8 for the tests of scales: scales that differ by head, outliers among keys,
and dense reference passes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KV_SCALES_FILE
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_config, load_model
from models.kv_scales import KVScales, write_kv_scales

GOLDEN = Path(__file__).parent.parent / "golden"


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, folder / name))


def scales_by_head(directory: Path, exponents: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Assigns the next of these powers of two, cyclically, to each layer, component and head."""
    count = 0
    found: list[dict[str, np.ndarray]] = []
    for layer in load_config(directory).kv_spec("float32").layers:
        found.append({})
        for part in layer.components:
            heads = max(1, part.heads)
            powers = [exponents[(count + head) % len(exponents)] for head in range(heads)]
            found[-1][part.name] = np.exp2(np.array(powers, np.float32))
            count += heads
    return found


def with_scales(directory: Path, scales: KVScales) -> Path:
    write_kv_scales(directory / KV_SCALES_FILE, load_config(directory), scales, "a test")
    return directory


def rounded(values: np.ndarray, scale_K: np.ndarray) -> np.ndarray:
    """Rounds [T, K, H] to e4m3 after division by a scale per head, in numpy."""
    scale = scale_K[:, None]
    limited = np.clip(np.asarray(values, np.float32) / scale, -448, 448)
    return (limited.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).astype(values.dtype)


def attend_rounded(scales: Sequence[Mapping[str, np.ndarray]]) -> Callable[..., jax.Array]:
    """Dense attention for one pass over a model. Keys and values of each attending layer are first
    rounded by `rounded`."""
    layers = iter([layer for layer in scales if layer])

    def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: Any, **how: Any) -> jax.Array:
        def kept(array: jax.Array, scale_K: np.ndarray) -> jax.Array:
            shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
            return jax.pure_callback(lambda x: rounded(np.asarray(x), scale_K), shape, array)

        of_layer = list(next(layers).values())
        parts = [k_TKH] if v_TKH is None else [k_TKH, v_TKH]
        parts = [kept(*each) for each in zip(parts, of_layer, strict=True)]
        return dense_causal_attend(q_TNH, parts[0], parts[1] if len(parts) == 2 else None, **how)

    return attend


def dense_logits(
    directory: Path,
    ids: Sequence[int],
    attend: Callable[..., jax.Array] = dense_causal_attend,
    dtype: str = "float32",
    kv_dtype: str = "",
) -> np.ndarray:
    """Returns float32 [T, V] of one dense pass on one device. `attend` receives what the model
    would cache."""
    devices = jax.devices()[-1:]
    model = load_model(directory, Layout(), devices, dtype=dtype, kv_dtype=kv_dtype).model
    positions_T = jnp.arange(len(ids), dtype=jnp.int32)
    logits = jax.jit(lambda ids_T: model(ids_T, positions_T, attend))(jnp.asarray(ids, jnp.int32))
    return np.asarray(logits, np.float32)


def with_outliers(name: str, folder: Path, bias: float, shrunk: float) -> Path:
    """Makes a model whose keys have biases of +-`bias` in two pairs of channels of each kv head, as
    some Qwen2 models have. Queries are `shrunk` there, as training does, or scores would be in the
    thousands."""
    directory = copied(name, folder)
    path, random = directory / "model.safetensors", np.random.default_rng(0)
    tensors = {name: values.copy() for name, values in load_file(path).items()}
    attention = load_config(directory).attention
    half, group = attention.head_dim // 2, attention.query_heads // attention.kv_heads
    for name in [name for name in tensors if name.endswith("k_proj.bias")]:
        keys = tensors[name].reshape(attention.kv_heads, -1)
        for head in range(attention.kv_heads):
            pairs = random.permutation(half)[:2]
            channels = np.concatenate((pairs, pairs + half))
            keys[head, channels] = bias * random.choice([-1, 1], channels.size)
            for part in ("weight", "bias"):
                of_queries = tensors[name.replace("k_proj.bias", f"q_proj.{part}")]
                heads = of_queries.reshape(attention.kv_heads, group, 2 * half, -1)
                heads[head, :, channels] *= shrunk
    save_file(tensors, path)
    return directory
