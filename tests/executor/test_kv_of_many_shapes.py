"""Caches of every make go from the pages of one mesh into those of another: by extract, hand-off
and insert, for layouts that cut them differently, against the pages themselves."""

import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.errors import ConfigError
from jdisagg.executor.block_programs import BlockPrograms, PullTargets
from jdisagg.executor.block_sums import Found
from jdisagg.executor.page_pool import PagePool
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.messages.step_commands import ExtractBlock, InsertBlock, PullBlock
from jdisagg.ops.kv_pages import as_kept
from jdisagg.ops.parameters import layout_mesh
from jdisagg.transfer.channel import block_sharding, mesh_card
from jdisagg.transfer.codec import check_codec
from jdisagg.transfer.in_process import InProcessChannel
from tests.lanes import first_quick

KEY = 0xFEED_C0FFEE
PAGES, TOKENS, BLOCK, START = 12, 39, 64, 9
WIDE = KVLayer((KVComponent("k", 4, 8), KVComponent("v", 4, 8)))
SPECS = {
    "latent": KVSpec.latent(2, 20, "float32"),
    "kinds": KVSpec(
        (WIDE, KVLayer((KVComponent("k", 8, 12), KVComponent("v", 8, 4))), WIDE), "bfloat16"
    ),
    "beside": KVSpec((WIDE, KVLayer((KVComponent("latent", 0, 24),))), "float32"),
    "types": KVSpec(
        (KVLayer((KVComponent("k", 2, 6, "float32"), KVComponent("v", 4, 10, "bfloat16"))),),
        "float32",
    ),
}


class Side(NamedTuple):
    mesh: jax.sharding.Mesh
    pool: PagePool
    blocks: BlockPrograms
    targets: PullTargets


def side(spec: KVSpec, layout: str, first_device: int, page_size: int) -> Side:
    shape = Layout.parse(layout)
    devices = jax.devices()[first_device : first_device + shape.devices]
    mesh = layout_mesh(shape, spec.row_heads, devices)
    programs = Programs(mesh)
    pool = PagePool(programs, spec, PAGES, page_size, 1)
    groups = (range(len(spec.layers)),)
    return Side(mesh, pool, BlockPrograms(programs, pool, groups), PullTargets(programs, spec))


def fill(pool: PagePool) -> None:
    rng = np.random.default_rng(7)
    pool.layers = [
        tuple(
            jax.device_put(as_kept(rng.standard_normal(part.shape), part.dtype), part.sharding)
            for part in layer
        )
        for layer in pool.layers
    ]


def tokens_of(pool: PagePool, rank: int, pages: tuple[int, ...]) -> list[np.ndarray]:
    """The sequence's tokens [K, T, H] of each component, as they lie in these pages of a rank; the
    same on all devices that hold them."""
    found = []
    for part in (part for layer in pool.layers for part in layer):
        whole = np.asarray(part).view(f"u{part.dtype.itemsize}")
        for shard in part.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data).view(whole.dtype), whole[shard.index]
            )
        mine = whole[[rank * pool.rank_rows + page for page in pages]]
        flat = mine.transpose(1, 0, 2, 3).reshape(mine.shape[1], -1, mine.shape[3])
        found.append(flat[:, START : START + TOKENS])
    return found


@pytest.mark.parametrize(
    ("name", "source", "target", "codec"),
    first_quick(
        [
            ("beside", "tp=2", "dp=2,tp=2", "none"),
            ("kinds", "tp=4", "dp=2,tp=2", "none"),
            ("types", "tp=1", "dp=2,tp=2", "none"),
            ("latent", "dp=2,tp=2", "tp=1", "none"),
            ("kinds", "tp=1", "tp=4", "int8"),
        ],
        ci=2,
    ),
)
def test_what_leaves_one_meshs_pages_lies_in_the_others(name, source, target, codec) -> None:
    spec = SPECS[name]
    here, there = side(spec, source, 0, 8), side(spec, target, 4, 16)
    fill(here.pool)
    rank, pages_here, pages_there = there.mesh.shape["dp"] - 1, (3, 1, 4, 0, 5, 9), (7, 2, 5)
    channel = InProcessChannel(MonotonicClock())
    block, sent, stamp = here.blocks.extract(
        ExtractBlock(0, 1, 0, 0, START, TOKENS, BLOCK, pages_here, KEY)
    )
    channel.offer(1, block, 0, stamp.of_offer(1))
    there.targets.connect("peer", mesh_card(here.mesh))
    asked = PullBlock(0, 1, rank, 0, BLOCK, 60.0, "peer", codec)
    pull = channel.pull(1, there.targets.target(asked, range(len(spec.layers))), 60.0)
    while not pull.is_ready():
        time.sleep(0.001)
    command = InsertBlock(0, 1, rank, 0, BLOCK, TOKENS, START, pages_there, KEY, "peer", codec)
    found = Found.read(there.blocks.insert(command, pull.arrays()))
    assert found.intact
    assert channel.bytes_per_pair() == channel.planned_bytes_per_pair()
    before, after = tokens_of(here.pool, 0, pages_here), tokens_of(there.pool, rank, pages_there)
    if codec == "none":
        assert found.checksum == Found.read(sent).checksum
        assert pull.bytes_moved == BLOCK * spec.bytes_per_token * there.mesh.shape["rep"]
        for sent_KTH, got_KTH in zip(before, after, strict=True):
            np.testing.assert_array_equal(got_KTH, sent_KTH)
    again, _, _ = there.blocks.extract(
        ExtractBlock(0, 2, rank, 0, START, TOKENS, BLOCK, pages_there, KEY)
    )
    error = np.abs(_values(again[rank]) - _values(block[0])).max()
    assert error == 0 if codec == "none" else 0 < error < 0.1


def _values(block: jax.Array) -> np.ndarray:
    return np.asarray(block).astype(np.float32)


def test_kv_of_several_types_is_not_packed() -> None:
    check_codec("int8", SPECS["kinds"])
    check_codec("none", SPECS["types"])
    with pytest.raises(ConfigError, match="'int8' packs values of one floating type"):
        check_codec("int8", SPECS["types"])


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_that_is_inserted_copies_no_pool(dtype: str) -> None:
    """In a model whose tokens are large, so that a run is less than a page: as XLA compiled it, no
    component's pages are copied, nor made wider and narrower again."""
    spec = KVSpec.attention(12, 12, 64, dtype)
    mesh = layout_mesh(Layout(), spec.row_heads, jax.devices()[:1])
    programs = Programs(mesh)
    pool = PagePool(programs, spec, 30, 16, 1)
    blocks = BlockPrograms(programs, pool, (range(12),))
    ones = np.ones((1, 24, 12, 64, 64), jnp.dtype(dtype))
    arrays = (jax.device_put(ones, block_sharding(mesh)),)
    before = [part for layer in pool.layers for part in layer]
    command = InsertBlock(1, 1, 0, 0, 64, 60, 3, (5, 9, 2, 4), KEY)
    assert Found.read(blocks.insert(command, arrays)).intact
    assert all(part.is_deleted() for part in before)  # the program has taken them over
    (program,) = programs._built.values()
    text = program.as_text()  # type: ignore[attr-defined]
    shape = ",".join(map(str, before[0].shape))
    kept = {"float32": "f32", "bfloat16": "u16"}[dtype]
    assert f"{kept}[{shape}]" in text
    assert not re.findall(rf"= \w+\[{shape}\]\S* (copy|convert)\(", text)
