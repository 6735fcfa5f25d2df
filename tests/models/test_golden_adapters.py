"""Logits with a LoRA adapter against PEFT, which merges it into the checkpoint
(tests/golden/make_adapters.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.layout.axes import Layout
from jdisagg.model_api import AdapterRows, AdapterSize, Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from models.adapters import read_adapter
from models.checkpoint import load_config, load_model
from models.decoder import Decoder, abstract_model
from models.linear import AdapterStack
from tests.golden.arrays import arrays_of
from tests.lanes import first_quick

GOLDEN = Path(__file__).parent.parent / "golden"
FIXTURES = ["llama_tied", "deepseek_v3", "qwen3_moe", "phi3"]
SLOTS, RANK = 2, 8


def adapted(model: Decoder, adapter: Path, slot: int) -> Decoder:
    """The model with an adapter in one of its slots, and another content in the others."""
    size = AdapterSize(SLOTS, RANK, experts=True)

    def noise(shape: tuple[int, ...], axes: object) -> jax.Array:
        return jax.random.normal(jax.random.key(len(shape)), shape)

    layers = model.adapted_layers(size, noise)
    content = model.read_adapter(adapter, size)
    assert any(content.layers)
    for layer, factors in zip(layers, content.layers, strict=True):
        for path, stack in _stacks(layer):
            a, b = factors.get(path, (np.zeros(0), np.zeros(0)))
            ours_a, ours_b = np.array(stack.a[...]), np.array(stack.b[...])
            ours_a[..., slot - 1, :] = 0
            ours_b[..., slot - 1, :, :] = 0
            if path in factors:
                ours_a[..., slot - 1, : a.shape[-1]] = a
                ours_b[..., slot - 1, : b.shape[-2], :] = b
            stack.a[...], stack.b[...] = jnp.asarray(ours_a), jnp.asarray(ours_b)
    model.layers = type(model.layers)(layers)
    return model


def _stacks(layer: nnx.Module) -> list[tuple[tuple[str, ...], AdapterStack]]:
    return [
        (tuple(map(str, path)), module)
        for path, module in nnx.iter_modules(layer)
        if isinstance(module, AdapterStack)
    ]


@pytest.mark.parametrize(("name",), first_quick(((name,) for name in FIXTURES), ci=2))
def test_logits_equal_those_of_the_merged_checkpoint(name: str) -> None:
    folder = GOLDEN / "adapters" / name
    expected = arrays_of(folder / "expected.npz")
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1]).model
    count = len(expected["prompt"])
    tokens_T, at_T = jnp.asarray(expected["prompt"], jnp.int32), jnp.arange(count)
    plain_TV = np.asarray(model(tokens_T, at_T, dense_causal_attend))
    model = adapted(model, folder, slot=2)
    for alike in (False, True):
        rows = AdapterRows(jnp.full(count, 2, jnp.int32), alike)
        logits_TV = model(tokens_T, at_T, dense_causal_attend, Shards(adapters=rows))
        ours, theirs = (jax.nn.log_softmax(one) for one in (logits_TV, expected["logits"]))
        assert np.abs(np.asarray(ours - theirs)).max() < 1e-4
    nobody = AdapterRows(jnp.zeros(count, jnp.int32))
    base_TV = model(tokens_T, at_T, dense_causal_attend, Shards(adapters=nobody))
    np.testing.assert_array_equal(np.asarray(base_TV), plain_TV)


def test_patterns_refer_to_the_names_in_the_files(tmp_path: Path) -> None:
    module = "model.language_model.layers.0.self_attn.q_proj"  # served as model.layers.0...
    matrix = load_file(GOLDEN / "qwen3_vl" / "model.safetensors")[f"{module}.weight"]
    factors = {"A": np.ones((4, matrix.shape[1])), "B": np.ones((matrix.shape[0], 4))}
    tensors = {
        f"base_model.model.{module}.lora_{key}.weight": each.astype(np.float32)
        for key, each in factors.items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8}
    config |= {"rank_pattern": {module: 4}, "alpha_pattern": {r".*language_model.*q_proj": 12}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = abstract_model(load_config(GOLDEN / "qwen3_vl"))
    (pair,) = read_adapter(tmp_path, AdapterSize(SLOTS, RANK), model).layers[0].values()
    np.testing.assert_array_equal(pair[1], 12 / 4)
