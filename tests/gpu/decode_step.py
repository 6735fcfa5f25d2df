"""Compiles one unrolled decode step and one prefill attention for an H200 without having one;
prints what came out as JSON.

Run as a script by `test_deviceless_compile.py`, in a process of its own because XLA reads its dump
folder from the environment once: `python -m tests.gpu.decode_step TARGET_CONFIG DUMP_FOLDER`."""

import json
import os
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from jdisagg.ops.kv_pages import decode_coordinates, write_tokens
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import PastPages, prefill_attention

LAYERS, BATCH, QUERY_HEADS, KV_HEADS, HEAD, WIDTH, FFN, VOCABULARY = (
    4,
    32,
    32,
    8,
    128,
    4096,
    14336,
    32000,
)
PAGES, SLOTS, COLUMNS = 512, 16, 128
CHUNK = 512


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _rotate(x_BNH: jax.Array, positions_B: jax.Array) -> jax.Array:
    half = x_BNH.shape[-1] // 2
    angle = (
        positions_B[:, None].astype(jnp.float32)
        * 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)[None]
    )[:, None]
    a, b = jnp.split(x_BNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    ).astype(x_BNH.dtype)


def decode(
    weights: Any, pools: Any, tokens_B: jax.Array, positions_B: jax.Array, table_BN: jax.Array
) -> Any:
    """Weights are read, pools, tokens and positions are donated and come back."""
    embedding_VD, layers = weights
    page_B, slot_B = decode_coordinates(table_BN, positions_B, slots=SLOTS)
    x_BD, new_pools = embedding_VD[tokens_B], []
    for (qkv, out, up, down), (k_pages, v_pages) in zip(layers, pools, strict=True):
        heads = (_norm(x_BD) @ qkv).reshape(BATCH, QUERY_HEADS + 2 * KV_HEADS, HEAD)
        q, k, v = jnp.split(heads, [QUERY_HEADS, QUERY_HEADS + KV_HEADS], axis=1)
        k_pages = write_tokens(k_pages, _rotate(k, positions_B), page_B, slot_B, unique=True)
        v_pages = write_tokens(v_pages, v, page_B, slot_B, unique=True)
        new_pools.append((k_pages, v_pages))
        o = paged_attention(
            _rotate(q, positions_B),
            k_pages,
            v_pages,
            table_BN,
            positions_B,
            scale=HEAD**-0.5,
            platform="gpu",
        )
        x_BD = x_BD + o.reshape(BATCH, -1) @ out
        gate, value = jnp.split(_norm(x_BD) @ up, 2, axis=1)
        x_BD = x_BD + (jax.nn.silu(gate) * value) @ down
    logits_BV = (_norm(x_BD) @ embedding_VD.T).astype(jnp.float32)
    return new_pools, jnp.argmax(logits_BV, -1).astype(jnp.int32), positions_B + 1


def main(target_config: str, dump: str) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
    from jax._src.mesh import AbstractDevice

    with open(target_config) as file:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=file.read(), topology="1x1x1"
        )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    layer = (
        array(WIDTH, (QUERY_HEADS + 2 * KV_HEADS) * HEAD),
        array(QUERY_HEADS * HEAD, WIDTH),
        array(WIDTH, 2 * FFN),
        array(FFN, WIDTH),
    )
    pool = array(PAGES, KV_HEADS, SLOTS, HEAD)
    step = (
        (array(VOCABULARY, WIDTH), [layer] * LAYERS),
        [(pool, pool)] * LAYERS,
        integers(BATCH),
        integers(BATCH),
        integers(BATCH, COLUMNS),
    )
    past = PastPages(pool, pool, integers(1, COLUMNS), integers(1), integers())
    tokens = (
        array(CHUNK, QUERY_HEADS, HEAD),
        array(CHUNK, KV_HEADS, HEAD),
        array(CHUNK, KV_HEADS, HEAD),
        integers(CHUNK),
        integers(CHUNK),
    )
    attend = partial(prefill_attention, scale=HEAD**-0.5, platform="gpu", packed=False)
    with use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=device)):
        decode_memory = (
            jax.jit(decode, donate_argnums=(1, 2, 3)).lower(*step).compile().memory_analysis()
        )
        prefill = jax.jit(attend).lower(*tokens, past).compile()
    found = {
        "pool_bytes": 2 * LAYERS * pool.size * 2,
        "alias_bytes": decode_memory.alias_size_in_bytes,
        "temp_bytes": decode_memory.temp_size_in_bytes,
        "prefill_cudnn_calls": prefill.as_text().count('custom_call_target="__cudnn$fmha'),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
