"""The TPU's kernel of prefill attention, interpreted on a CPU, against dense attention in float64
and against the form in plain XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.ops import prefill_attention_tpu as kernel
from jdisagg.ops.kv_pages import PastPages, as_kept
from jdisagg.ops.prefill_attention import first_key, prefill_attention
from jdisagg.ops.quarantine import MARKER
from tests.lanes import first_ci, first_quick
from tests.ops.prefill_chunks import SINKS_N, Chunk

pytestmark = pytest.mark.one_device


def run(chunk: Chunk, dtype: str = "float32", *, past: bool, **how: Any) -> np.ndarray:
    def attend(q_TNH, k_TKH, v_TKH, segment_T, positions_T, earlier) -> jax.Array:
        assert kernel.supports(q_TNH, k_TKH, earlier, latent=False)
        shared = (q_TNH, k_TKH, v_TKH, segment_T, positions_T)
        first_T = first_key(segment_T, how.get("window"))
        options = {"window": None, "cap": 0.0, "sinks_N": None, "marked": False, **how}
        return kernel.attend(
            *shared, first_T, earlier, scale=chunk.scale, interpret=True, **options
        )

    out = jax.jit(attend)(*arrays(chunk, dtype), earlier(chunk, dtype) if past else None)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def arrays(chunk: Chunk, dtype: str) -> tuple[jax.Array, ...]:
    heads = [jnp.asarray(part, dtype) for part in (chunk.q, chunk.k, chunk.v)]
    return (*heads, jnp.asarray(chunk.segment), jnp.asarray(chunk.positions))


def earlier(chunk: Chunk, dtype: str) -> PastPages:
    pages = chunk.past
    assert pages.v_pages_PKSH is not None
    if pages.k_pages_PKSH.dtype == jnp.uint8:
        return pages
    return pages._replace(
        k_pages_PKSH=pages.k_pages_PKSH.astype(dtype), v_pages_PKSH=pages.v_pages_PKSH.astype(dtype)
    )


@pytest.mark.parametrize(
    ("past", "how"),
    first_quick(
        [
            (False, {"window": 30, "cap": 0.7, "sinks_N": SINKS_N}),
            (True, {"window": 30, "cap": 0.7, "sinks_N": SINKS_N}),
            (True, {}),
        ],
        ci=2,
    ),
)
def test_packed_sequences_see_their_own_tokens_and_pages(past: bool, how: dict[str, Any]) -> None:
    rows = [(200, 30), (9, 50), (1, 1), (0, 25)] if past else [(0, 1), (0, 40), (0, 60)]
    chunk = Chunk(rows, width=64, slots=64)
    real = chunk.segment >= 0
    want = chunk.expected(**how)[real]
    np.testing.assert_allclose(run(chunk, past=past, **how)[real], want, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("past", "window"), first_ci([(True, 7), (False, 600), (True, 600), (False, 1)], ci=2)
)
def test_chunks_of_several_blocks_leave_out_keys_outside_the_window(
    past: bool, window: int
) -> None:
    """Blocks of 128 queries (two heads a kv head), and of 256 keys, in the chunk and in pages."""
    chunk = Chunk(
        [(1100 if past else 0, 700), (300 if past else 0, 450)],
        heads=1, groups=2, width=64, slots=128,
    )  # fmt: skip
    real = chunk.segment >= 0
    got = run(chunk, past=past, window=window)[real]
    np.testing.assert_allclose(got, chunk.expected(window)[real], atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(("width",), first_ci([(64,), (128,)]))
def test_bfloat16_differs_from_the_xla_form_by_its_rounding(width: int) -> None:
    chunk = Chunk([(40, 60), (0, 70)], width=width, slots=32)
    attend = functools.partial(prefill_attention, scale=chunk.scale, platform="tpu")
    want = jax.jit(attend)(*arrays(chunk, "bfloat16"), earlier(chunk, "bfloat16"))
    real = chunk.segment >= 0
    got = run(chunk, "bfloat16", past=True)[real]
    np.testing.assert_allclose(got, np.asarray(want, np.float32)[real], atol=2e-2)
    np.testing.assert_allclose(got, chunk.expected()[real], atol=4e-2)


@pytest.mark.ci
def test_pages_of_fp8_are_read_as_the_xla_form_reads_them() -> None:
    chunk = Chunk([(100, 30), (0, 40)], width=64, slots=32)
    _, v_pages, *_ = chunk.past
    assert v_pages is not None
    k_PKSH, v_PKSH = (
        as_kept(part, jnp.dtype("uint8")) for part in (chunk.past.k_pages_PKSH, v_pages)
    )
    chunk.past = chunk.past._replace(k_pages_PKSH=k_PKSH, v_pages_PKSH=v_PKSH)
    attend = functools.partial(prefill_attention, scale=chunk.scale, platform="tpu")
    want = jax.jit(attend)(*arrays(chunk, "float32"), chunk.past)
    real = chunk.segment >= 0
    np.testing.assert_allclose(run(chunk, past=True)[real], np.asarray(want)[real], atol=1e-5)
    assert np.abs(np.asarray(want) - chunk.expected())[real].max() > 1e-3, "fp8 took effect"


@pytest.mark.ci
def test_latent_keys_with_the_marker_of_another_sequence_change_nothing() -> None:
    """Values are narrower than keys, as in the expanded form of latent attention."""
    chunk = Chunk([(0, 40), (0, 50)], width=128)
    chunk.v = chunk.v[..., :64]
    chunk.k[:40], chunk.v[:40] = MARKER, MARKER
    got = run(chunk, past=False, marked=True)
    np.testing.assert_allclose(got[40:90], chunk.expected()[40:90, :, :64], atol=1e-5)
    assert (got[:40] > 1e15).all(), "the faulty sequence shows"


def test_a_rank_without_tokens_has_one_item() -> None:
    q_TNH, k_TKH = jnp.zeros((256, 2, 64)), jnp.zeros((256, 1, 64))
    padding_T = jnp.full(256, -1, jnp.int32)
    first_T, sizes = first_key(padding_T, None), kernel._sizes(q_TNH, k_TKH, None)
    items, count = kernel._items(padding_T, padding_T, first_T, None, sizes, None)
    assert int(count) == 1 and int(items.row[0]) == -1
    assert int(items.block[0]) in (0, 1) and int(items.own[0]) == 0


def test_key_blocks_without_a_visible_key_have_no_item() -> None:
    """Two sequences of 1024 tokens in blocks of 512 (two heads a kv head): the second sees nothing
    of the first, and a window of one token leaves a block with itself."""
    segment_T = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 1024)
    q_TNH, k_TKH = (jnp.zeros((2048, heads, 64), jnp.bfloat16) for heads in (2, 1))
    sizes = kernel._sizes(q_TNH, k_TKH, None)
    assert (sizes.queries, sizes.keys) == (512, 512)
    all_seen, themselves = [(0, 0), (1, 0), (1, 1), (2, 2), (3, 2), (3, 3)], range(4)
    for window, blocks in ((None, all_seen), (1, [(block, block) for block in themselves])):
        first_T = first_key(segment_T, window)
        items, count = kernel._items(segment_T, segment_T, first_T, None, sizes, window)
        found = list(zip(items.block.tolist(), items.own.tolist(), strict=True))
        assert found[: int(count)] == blocks
        assert set(items.block.tolist()[int(count) :]) <= {-1}


def test_the_kernel_is_for_tpus_and_for_sizes_that_it_has() -> None:
    def applies(q: tuple[int, ...], heads: int, dtype: str = "bfloat16", **how: Any) -> bool:
        k_TKH = jnp.zeros((q[0], heads, q[2]), dtype)
        options = {"platform": "tpu", "device_kind": "TPU v6 lite", "latent": False, **how}
        return kernel.applies(jnp.zeros(q, dtype), k_TKH, None, **options)

    assert applies((512, 8, 128), 2) and applies((512, 8, 64), 2)
    assert not applies((512, 8, 64), 2, "float32")
    assert not applies((512, 8, 128), 2, platform="gpu")
    assert not applies((512, 8, 128), 2, device_kind="")
    assert not applies((512, 8, 80), 2)
    assert not applies((512, 128, 64), 1)
