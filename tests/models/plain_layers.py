"""Parts of a Llama layer in NumPy."""

from collections.abc import Callable

import numpy as np

TOKENS = np.array([5, 17, 99, 4, 23, 23, 60, 11], np.int32)


def norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon) * weight


def plain_attention(
    into: np.ndarray, weight: Callable[[str], np.ndarray], fields: dict
) -> np.ndarray:
    """Grouped attention with rotary positions."""
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    size = fields["hidden_size"] // heads
    theta = fields.get("rope_theta") or fields["rope_parameters"]["rope_theta"]
    angles = np.arange(len(into))[:, None] * theta ** (-np.arange(size // 2) / (size // 2))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x_TNH: np.ndarray) -> np.ndarray:
        first, second = np.split(x_TNH, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q, k, v = (
        (into @ weight(f"self_attn.{name}_proj").T).reshape(len(into), -1, size) for name in "qkv"
    )
    q, k = turned(q), np.repeat(turned(k), heads // kv_heads, axis=1)
    scores = np.einsum("tnh,snh->nts", q, k) * size**-0.5
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("nts,snh->tnh", shares, np.repeat(v, heads // kv_heads, axis=1))
    return mixed.reshape(len(into), -1) @ weight("self_attn.o_proj").T


def plain_feed_forward(into: np.ndarray, weight: Callable[[str], np.ndarray]) -> np.ndarray:
    gate = into @ weight("mlp.gate_proj").T
    hidden = gate / (1 + np.exp(-gate)) * (into @ weight("mlp.up_proj").T)
    return hidden @ weight("mlp.down_proj").T
