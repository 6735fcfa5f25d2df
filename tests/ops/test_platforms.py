"""Every op can be traced for every platform, in the sizes of real models. Nothing is computed."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jdisagg.errors import ConfigError
from jdisagg.layout.platforms import traits_of
from jdisagg.model_api import Latent, Shards
from jdisagg.ops.activations import ClampedGate
from jdisagg.ops.kv_pages import PastPages, gather_block, kept_dtype, write_tokens
from jdisagg.ops.linear import project
from jdisagg.ops.moe import ExpertWeights, Routing, routed_experts
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import prefill_attention
from jdisagg.ops.sampling import SamplingRows, sample

pytestmark = [pytest.mark.one_device, pytest.mark.ci]
PLATFORMS = ["cpu", "gpu", "tpu"]
PAGES, SLOTS, ROWS, COLUMNS = 64, 64, 16, 32
# query heads, kv heads, width of keys and values
HEADS = [(32, 8, 128), (64, 8, 64), (16, 8, 256)]


def of(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def pages(heads: int, width: int, platform: str) -> jax.ShapeDtypeStruct:
    return of(PAGES, heads, SLOTS, width, dtype=str(kept_dtype("bfloat16", platform)))


def latent() -> Latent:
    return Latent(of(128, 512, 128), of(128, 512, 128))  # type: ignore[arg-type]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("heads", "window"), list(zip(HEADS, (None, 128, None), strict=True)), ids=str
)
def test_decode_attention(platform: str, heads: tuple[int, int, int], window: int | None) -> None:
    queries, kv, width = heads
    how = {"scale": 0.1, "window": window, "platform": platform}
    kept = pages(kv, width, platform)
    table, at = of(8, COLUMNS, dtype="int32"), of(8, dtype="int32")
    out = jax.eval_shape(
        partial(paged_attention, **how), of(8, queries, width), kept, kept, table, at
    )
    assert (out.shape, out.dtype) == ((8, queries, width), jnp.bfloat16)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decode_attention_over_latents(platform: str) -> None:
    table, at = of(8, COLUMNS, dtype="int32"), of(8, dtype="int32")
    out = jax.eval_shape(
        lambda q, k, t, p, m: paged_attention(
            q, k, None, t, p, scale=0.1, latent=m, platform=platform
        ),
        *(of(8, 128, 192), pages(1, 576, platform), table, at, latent()),
    )
    assert out.shape == (8, 128, 128)


# heads on a GPU take cuDNN, which asks for a device when it is traced
@pytest.mark.parametrize(
    ("platform", "kind"),
    [("cpu", "heads"), ("tpu", "heads"), *((platform, "latents") for platform in PLATFORMS)],
)
@pytest.mark.parametrize(("packed", "past"), [(True, True), (False, False), (False, True)])
def test_prefill_attention(platform: str, packed: bool, past: bool, kind: str) -> None:
    tokens = 2048
    kv, width = (1, 576) if kind == "latents" else (8, 128)
    kept = pages(kv, width, platform)
    earlier = PastPages(
        kept,  # type: ignore[arg-type]
        None if kind == "latents" else kept,  # type: ignore[arg-type]
        of(ROWS, COLUMNS, dtype="int32"),  # type: ignore[arg-type]
        of(ROWS, dtype="int32"),  # type: ignore[arg-type]
        of(dtype="int32"),  # type: ignore[arg-type]
    )
    queries, query_width = (128, 192) if kind == "latents" else (32, 128)

    def attend(q, k, v, segment, at, earlier, matrices):
        return prefill_attention(
            *(q, k, v, segment, at, earlier),
            scale=0.1,
            latent=matrices,
            platform=platform,
            packed=packed,
            rows=ROWS,
            query_block=256,
        )

    out = jax.eval_shape(
        attend,
        of(tokens, queries, query_width),
        of(tokens, kv, width),
        None if kind == "latents" else of(tokens, kv, width),
        of(tokens, dtype="int32"),
        of(tokens, dtype="int32"),
        earlier if past else None,
        latent() if kind == "latents" else None,
    )
    assert out.shape == (tokens, queries, 128)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", 8), ("bfloat16", 2048), ("float32", 8)])
def test_experts_and_products(platform: str, dtype: str, tokens: int) -> None:
    held, width, ffn = 16, 2880, 2880
    inward, outward = of(held, width, ffn, dtype=dtype), of(held, ffn, width, dtype=dtype)
    biases = of(held, ffn, dtype=dtype), of(held, ffn, dtype=dtype), of(held, width, dtype=dtype)
    weights = ExpertWeights(inward, inward, outward, None, None, None, *biases)  # type: ignore[arg-type]
    routing = Routing(of(tokens, 4, dtype="int32"), of(tokens, 4, dtype="float32"))  # type: ignore[arg-type]
    shards = Shards(platform=platform, device_kind="NVIDIA H200")
    apply = partial(routed_experts, shards=shards, experts=held, clamp=ClampedGate(7.0, 1.702))
    x_TD = of(tokens, width, dtype=dtype)
    assert jax.eval_shape(apply, x_TD, routing, weights).shape == (tokens, width)
    product = partial(project, platform=platform)
    assert jax.eval_shape(product, x_TD, of(width, ffn, dtype=dtype)).shape == (tokens, ffn)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_pages_and_sampling(platform: str) -> None:
    kept, at = pages(8, 128, platform), of(512, dtype="int32")
    write = partial(write_tokens, unique=False, platform=platform)
    assert jax.eval_shape(write, kept, of(512, 8, 128), at, at) == kept
    read = jax.eval_shape(partial(gather_block, platform=platform), kept, at, at)
    assert read.shape == (8, 512, 128)
    whole = {"top_k": "int32", "child": "int32", "position": "int32"}
    fields = {name: of(32, dtype=whole.get(name, "float32")) for name in SamplingRows._fields}
    rows = SamplingRows(**{**fields, "seed": of(32, 2, dtype="uint32")})  # type: ignore[arg-type]
    token = jax.eval_shape(partial(sample, platform=platform), of(32, 1000, dtype="float32"), rows)
    assert token.shape == (32,)


def test_an_unknown_platform_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="platform 'metal' is not supported: .* cpu, gpu, tpu"):
        traits_of("metal")
