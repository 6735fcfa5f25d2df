"""Codecs: what a leaf looks like, that pieces may be packed apart and put together, and what their
sums notice."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.errors import ConfigError, LayoutError
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import CODECS, Codec, codec, stamp_array
from tests.lanes import first_quick

C, K, T, H = 4, 4, 32, 8
STAMP = BlockStamp(key=0xFEDCBA9876543210, component=6, start=48, valid_tokens=27)
LOSSY = [name for name in CODECS if name != "none"]
BOUNDS = {"int8": 1 / 254, "int4": 1 / 14, "fp8": 1 / 16}
Leaves = tuple[jax.Array, ...]


def block(dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(1, C, K, T, H)), jnp.dtype(dtype))


@cache
def compiled(how: Codec) -> tuple[Callable[..., Leaves], Callable[..., jax.Array]]:
    """Kept, since JAX traces a method anew for each object that stands for it."""
    return jax.jit(how.encode), jax.jit(how.verify)


def encode(how: Codec, piece: jax.Array, first_head: int = 0) -> Leaves:
    return compiled(how)[0](piece, stamp_array(STAMP), np.int32(first_head))


def intact(how: Codec, leaves: Leaves, first_head: int = 0, stamp: BlockStamp = STAMP) -> bool:
    return bool(compiled(how)[1](leaves, stamp_array(stamp), np.int32(first_head)))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.ci)])
@pytest.mark.parametrize("name", CODECS)
def test_leaves_are_as_announced_and_a_piece_comes_back_within_the_bound(name, dtype):
    how, piece = codec(name), block(dtype)
    leaves = encode(how, piece)
    announced = how.leaves(jax.ShapeDtypeStruct(piece.shape, piece.dtype))
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in announced]
    assert all(leaf.ndim == 5 and leaf.shape[2] == K for leaf in leaves)
    assert intact(how, leaves)
    back = jax.jit(partial(how.decode, dtype=piece.dtype))(leaves)
    assert (back.shape, back.dtype) == (piece.shape, piece.dtype)
    wide = np.asarray(piece, np.float32)
    error = np.abs(np.asarray(back, np.float32) - wide)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    rounding = largest * (2.0**-8 if dtype == "bfloat16" else 2.0**-21)
    assert np.all(error <= largest * BOUNDS.get(name, 0) + (rounding if how.lossy else 0))


@pytest.mark.parametrize(("name",), first_quick([(name,) for name in LOSSY], ci=2))
def test_it_saves_what_it_says_and_heads_packed_apart_are_the_heads_of_the_whole(name):
    how, piece = codec(name), block()
    large = jax.ShapeDtypeStruct((1, C, K, 512, 64), jnp.dtype(jnp.bfloat16))
    sizes = [np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in how.leaves(large)]
    values = C * K * 512
    assert sizes == [values * (32 if name == "int4" else 64), values * 4, K * 8]
    whole = encode(how, piece, first_head=8)
    parts = [encode(how, piece[:, :, k : k + 2], first_head=8 + k) for k in (0, 2)]
    for leaf, *apart in zip(whole, *parts, strict=True):
        joined = np.concatenate([np.asarray(part) for part in apart], axis=2)
        np.testing.assert_array_equal(np.asarray(leaf), joined)


@pytest.mark.parametrize(("name",), first_quick([(name,) for name in LOSSY]))
def test_every_kind_of_damage_is_noticed(name):
    how, rng = codec(name), np.random.default_rng(3)
    leaves = encode(how, block())
    for index, leaf in enumerate(leaves):
        array = np.asarray(leaf)
        for _ in range(10):
            broken = array.copy()
            flat = (
                broken.reshape(-1, broken.shape[-1]).view(np.uint8)
                if index == 2
                else broken[:, :, :, : STAMP.valid_tokens].view(np.uint8)
            )
            at = tuple(rng.integers(0, size) for size in flat.shape)
            flat[at] ^= np.uint8(1 << rng.integers(0, 8))
            assert not np.array_equal(broken.view(np.uint8), array.view(np.uint8)), (
                "the fault took no effect"
            )
            assert not intact(how, (*leaves[:index], jnp.asarray(broken), *leaves[index + 1 :]))
    assert not intact(how, tuple(leaf[:, :, ::-1] for leaf in leaves))
    for wrong in ({"key": 1}, {"start": 49}, {"component": 7}, {"valid_tokens": 26}):
        assert not intact(how, leaves, stamp=replace(STAMP, **wrong)), wrong
    assert not intact(how, leaves, first_head=1)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_that_nobody_sent_are_intact_where_no_token_counts(name):
    how, whole = codec(name), jax.ShapeDtypeStruct((1, C, K, T, H), jnp.dtype("float32"))
    zeros = tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in how.leaves(whole))
    assert intact(how, zeros, stamp=BlockStamp())
    assert not np.any(np.asarray(how.decode(zeros, jnp.dtype("float32"))))


def test_unknown_codecs_and_odd_heads_are_refused_by_name():
    with pytest.raises(ConfigError, match="'zip' is unknown; choose one of none, int8, int4, fp8"):
        codec("zip")
    with pytest.raises(LayoutError, match="'int4'.*head size 7"):
        codec("int4").leaves(jax.ShapeDtypeStruct((1, 2, 1, 16, 7), jnp.dtype("float32")))
