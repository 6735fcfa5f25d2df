"""KV in fp8: a server's log-probabilities are those of a dense pass whose keys and values were
rounded to e4m3 by numpy, with scales of the model's heads or without, for layouts and kinds of
KV."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import KV_SCALES_FILE, KVSpec
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.transfer.codec import check_codec
from models.checkpoint import load_config
from tests.end_to_end.clusters import golden_copy, running
from tests.models.kv_scale_models import attend_rounded, dense_logits, scales_by_head, with_scales
from tests.shapes import LLAMA, config

PROMPT = "Once upon a time there was a little girl named Lily who lived in a small house near the"
TOKENS = 40
# A value between two e4m3 values may be rounded either way, because sums have another order
# elsewhere. The effect of rounding as a whole is far larger.
CLOSE, APART = 4e-3, 2e-2
# Powers of two: small ones clip some heads' largest values and large ones lose bits of small
# values, so that a scale of another head would show.
ONES, BY_HEAD = (0,), (-7, 1, -3, 0, -5)


def _dense_logprobs(
    directory: Path, ids: list[int], attend: Callable[..., jax.Array]
) -> np.ndarray:
    """Of each token behind the first, given those before it: float32 [T - 1]."""
    logprobs = np.asarray(jax.nn.log_softmax(dense_logits(directory, ids, attend), axis=-1))
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "exponents"),
    [
        pytest.param("llama", "tp=2", "dp=2", ONES, marks=pytest.mark.ci),
        pytest.param("deepseek_v3", "tp=1", "tp=2", BY_HEAD, marks=pytest.mark.ci),
        pytest.param("gpt_oss", "tp=2", "dp=2", BY_HEAD, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "tp=2", "tp=1", BY_HEAD, marks=pytest.mark.slow),
    ],
)
async def test_logprobs_are_those_of_a_dense_pass_over_rounded_keys_and_values(
    name: str, prefill: str, decode: str, exponents: tuple[int, ...], tmp_path: Path
) -> None:
    directory = LLAMA if name == "llama" else golden_copy(name, tmp_path)
    scales = scales_by_head(directory, exponents)
    if exponents != ONES:
        with_scales(directory, scales)
    sizes = config(prefill=prefill, decode=decode, directory=directory, chunk=16, context=256)
    sizes = replace(sizes, model=replace(sizes.model, kv_dtype="fp8"))
    vocabulary = load_config(directory).vocabulary
    async with running(sizes) as run:
        prompt = [
            token % vocabulary for token in run.tokenizer.encode(PROMPT)
        ]  # several chunks: KV in pages and KV of the chunk are rounded alike
        request = run.request(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        done = await run.complete(request)
        again = await run.complete(replace(request, request_id="again"))
        spec = run.cluster.kv_spec
        assert again.tokens == done.tokens
    whole = load_config(directory).kv_spec("float32")
    assert spec.bytes_per_token * 4 == whole.bytes_per_token  # float32: four bytes a value
    assert spec.state.bytes_per_token == whole.state.bytes_per_token  # state keeps its dtype
    ids = [*prompt, *done.tokens[0]]
    told = np.array([one.logprob for one in done.logprobs[0]], np.float32)  # type: ignore[attr-defined]
    rounded = _dense_logprobs(directory, ids, attend_rounded(scales))[-TOKENS:]
    exact = _dense_logprobs(directory, ids, dense_causal_attend)[-TOKENS:]
    assert np.abs(told - rounded).max() < CLOSE
    assert np.abs(rounded - exact).max() > APART, "rounding was to show"


def test_a_worker_with_other_scales_is_of_another_model(tmp_path: Path) -> None:
    """Hellos compare fingerprints, and cached blocks are named by them."""
    one, other = (golden_copy("llama_tied", tmp_path / name) for name in ("one", "other"))
    with_scales(one, scales_by_head(one, BY_HEAD))

    def agree(kv_dtype: str) -> bool:
        ours, theirs = (model_fingerprint(path, "float32", "", kv_dtype) for path in (one, other))
        return ours == theirs

    assert agree("") and not agree("fp8")
    with_scales(other, scales_by_head(one, ONES))
    assert agree("") and not agree("fp8")
    (other / KV_SCALES_FILE).write_bytes((one / KV_SCALES_FILE).read_bytes())
    assert agree("") and agree("fp8")


def test_kv_in_fp8_is_not_packed_again() -> None:
    with pytest.raises(ConfigError, match="fp8 already"):
        check_codec("int8", KVSpec.attention(2, 2, 16, "bfloat16", kept="uint8"))
    check_codec("none", KVSpec.attention(2, 2, 16, "bfloat16", kept="uint8"))


def test_a_type_that_kv_cannot_be_kept_in_is_refused_by_name() -> None:
    engine = config()
    with pytest.raises(ConfigError, match="kv_dtype must be fp8 or empty, got 'fp4'"):
        replace(engine, model=replace(engine.model, kv_dtype="fp4"))
