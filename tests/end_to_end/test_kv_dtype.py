"""KV kept in fp8: what a server says of its tokens is what a dense pass says whose keys and values
were rounded to e4m3 by numpy, whatever the mode, the layouts and the kind of KV."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.transfer.codec import check_codec
from models.checkpoint import load_config, load_model
from tests.end_to_end.clusters import LLAMA, MOE, config, golden_copy, running

PROMPT = "Once upon a time there was a little girl named Lily who lived in a small house near the"
TOKENS = 40
# A value at the edge between two of e4m3 may fall to either side, as sums are made elsewhere in
# another order; what rounding does as a whole is far more.
CLOSE, APART = 4e-3, 2e-2


def _rounded(values: jax.Array | None) -> jax.Array | None:
    def by_numpy(array: np.ndarray) -> np.ndarray:
        limited = np.clip(np.asarray(array, np.float32), -448, 448)
        return limited.astype(ml_dtypes.float8_e4m3fn).astype(array.dtype)

    if values is None:
        return None
    shape = jax.ShapeDtypeStruct(values.shape, values.dtype)
    return jax.pure_callback(by_numpy, shape, values, vmap_method="sequential")


def _attend_to_rounded(q_TNH: jax.Array, k_TKH: Any, v_TKH: Any, **how: Any) -> jax.Array:
    return dense_causal_attend(q_TNH, _rounded(k_TKH), _rounded(v_TKH), **how)


def _dense_logprobs(directory: Path, ids: list[int], attend: Callable[..., Any]) -> np.ndarray:
    """Of each token behind the first, given those before it: float32 [T - 1]."""
    model = load_model(directory, Layout(), jax.devices()[-1:]).model
    tokens = jnp.asarray(ids, jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    logits = jax.jit(lambda tokens: model(tokens, positions, attend))(tokens)
    logprobs = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1))
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize(
    ("name", "mode", "prefill", "decode"),
    [
        pytest.param("llama", Mode.DISAGGREGATED, "tp=2", "dp=2", marks=pytest.mark.ci),
        pytest.param("llama", Mode.CHUNKED, "", "dp=2,tp=2", marks=pytest.mark.ci),
        pytest.param("moe", Mode.DISAGGREGATED, "dp=2,tp=2", "tp=4", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", Mode.DISAGGREGATED, "tp=1", "tp=2", marks=pytest.mark.ci),
        pytest.param("gpt_oss", Mode.DISAGGREGATED, "tp=2", "dp=2", marks=pytest.mark.ci),
        pytest.param("qwen3_next", Mode.DISAGGREGATED, "tp=2", "tp=1", marks=pytest.mark.ci),
    ],
)
async def test_logprobs_are_those_of_a_dense_pass_over_rounded_keys_and_values(
    name: str, mode: Mode, prefill: str, decode: str, tmp_path: Path
) -> None:
    shipped = {"llama": LLAMA, "moe": MOE}
    directory = shipped.get(name) or golden_copy(name, tmp_path)
    sizes = config(mode, prefill or "tp=2", decode, directory=directory, chunk=16, context=256)
    sizes = replace(sizes, model=replace(sizes.model, kv_dtype="fp8"))
    vocabulary = load_config(directory).vocabulary
    async with running(sizes) as run:
        prompt = [
            token % vocabulary for token in run.tokenizer.encode(PROMPT)
        ]  # of several chunks: what is in pages and what is at hand are rounded alike
        request = run.request(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        done = await run.complete(request)
        again = await run.complete(replace(request, request_id="again"))
        spec = run.cluster.kv_spec
        assert again.tokens == done.tokens
    whole = load_config(directory).kv_spec("float32")
    assert spec.bytes_per_token * 4 == whole.bytes_per_token  # float32: four bytes a value
    assert spec.state.bytes_per_token == whole.state.bytes_per_token  # state is kept as it was
    ids = [*prompt, *done.tokens[0]]
    told = np.array([one.logprob for one in done.logprobs[0]], np.float32)  # type: ignore[attr-defined]
    rounded = _dense_logprobs(directory, ids, _attend_to_rounded)[-TOKENS:]
    exact = _dense_logprobs(directory, ids, dense_causal_attend)[-TOKENS:]
    assert np.abs(told - rounded).max() < CLOSE
    assert np.abs(rounded - exact).max() > APART, "rounding was to show"


def test_kv_in_fp8_is_not_packed_again() -> None:
    with pytest.raises(ConfigError, match="fp8 already"):
        check_codec("int8", KVSpec.attention(2, 2, 16, "bfloat16", kept="uint8"))
    check_codec("none", KVSpec.attention(2, 2, 16, "bfloat16", kept="uint8"))


def test_a_type_that_kv_cannot_be_kept_in_is_refused_by_name() -> None:
    engine = config()
    with pytest.raises(ConfigError, match="kv_dtype must be fp8 or empty, got 'fp4'"):
        replace(engine, model=replace(engine.model, kv_dtype="fp4"))
