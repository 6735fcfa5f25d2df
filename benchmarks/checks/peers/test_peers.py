"""The link to another project's engine, and the arithmetic of its measurements, over a driver
without a model."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.peers import link
from benchmarks.peers.checkpoint import measured_checkpoint
from benchmarks.peers.contender import DRIVERS, PeerEngine, check_same, step_seconds
from benchmarks.plain_loop import MEASURED_MODEL
from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.layout.axes import Layout
from models.checkpoint import load_model
from models.tokenizer import Tokenizer
from tests.time_scale import seconds

FAKE = Path(__file__).with_name("fake_driver.py")
ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    **MEASURED_MODEL,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 200,
}


async def test_a_peer_answers_with_its_own_clock_and_tokens():
    with link.started(sys.executable, FAKE) as peer:
        engine = PeerEngine(peer, model="m")
        assert engine.started["versions"] == {"fake": "1.0"}
        assert engine.started["path"] == ""  # nothing of ours can be imported there
        assert await engine.first_seconds(np.array([5, 6])) == 1.0
        total, step, tokens = await engine.batch(np.array([[5, 6], [9, 6]]), 6)
        assert (total, step) == (6.0, 1.0)
        assert tokens == [[5, 6, 7, 8, 9, 10], [9, 10, 11, 12, 13, 14]]
        assert set(engine.busy()) == {"theirs in our turns", "ours in their turns"}
        assert peer.cpu_seconds() >= 0.04  # the driver spends 0.05


def test_what_goes_wrong_at_the_peer_is_said_in_its_words():
    for misbehave, said in (
        ("it has no such model", "it has no such model"),
        ("ends", "no memory left for the model"),
    ):
        with link.started(sys.executable, FAKE) as peer:
            peer.ask("start", misbehave=misbehave)
            with pytest.raises(UnavailableError, match=said):
                peer.ask("generate", prompts=[[1]], tokens=1)


def test_a_peer_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "STOP_SECONDS", 0.0)
    with link.started(sys.executable, FAKE, answer_seconds=seconds(30.0)) as peer:
        peer.ask("start", misbehave="hangs")
        peer._seconds = 0.0
        with pytest.raises(UnavailableError, match="did not answer 'generate'"):
            peer.ask("generate", prompts=[[1]], tokens=1)
    assert peer._child.returncode is not None


def test_a_python_that_is_not_there_is_named_with_the_remedy():
    with (
        pytest.raises(ConfigError, match="--peer_python=/no/such/python cannot be run.*ENV/bin"),
        link.started("/no/such/python", FAKE),
    ):
        raise AssertionError


def test_a_python_without_the_peer_is_told_apart_from_one_that_is_not_there():
    with (
        link.started(sys.executable, DRIVERS["vllm"]) as peer,
        pytest.raises(UnavailableError, match="No module named 'vllm'"),
    ):
        peer.ask("start", model="m", dtype="float32", context_tokens=64, sequences=1, cores=[0])


def test_a_step_is_measured_while_all_streams_decode():
    # The second stream begins late: its third token is there at 9, the first one's last but one at
    # 13. Two tokens of one dispatch come at one instant.
    first = [1.0, 2.0, 3.0, 9.0, 9.0, 11.0, 11.0, 13.0, 13.0, 15.0, 15.0]
    second = [7.0, 8.0, 9.0, 11.0, 13.0, 15.0, 15.0]
    assert step_seconds([first, second]) == 1.0


def test_streams_that_differ_are_named_by_prompt_and_token():
    check_same([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    with pytest.raises(ConfigError, match=r"prompt 1, token 1, \[5\] where we have \[4\]"):
        check_same([[1, 2], [3, 4]], [[1, 2], [3, 5]])


def test_the_measured_checkpoint_loads_and_any_ids_survive_as_text(tmp_path: Path):
    folder = measured_checkpoint(tmp_path / "model", SMALL)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert measured_checkpoint(folder, SMALL) == folder  # once is enough
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    loaded = load_model(folder, Layout(), jax.devices()[:1])
    embedding = loaded.model.stem.embedding
    assert embedding is not None and embedding.shape == (200, 32)
    tokenizer = Tokenizer.from_directory(folder)
    ids = np.random.default_rng(0).integers(3, 200, 50).tolist()
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.decode(ids[:7]) + tokenizer.decode(ids[7:]) == tokenizer.decode(ids)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w5 w6"}]) == "w5 w6 "


@pytest.mark.ci
def test_the_benchmark_says_what_is_missing(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.throughput", "--peer=vllm", "--parts=grpc"],
        cwd=ROOT,
        env={"PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    said = "error: --parts=grpc is not measured against --peer=vllm"
    assert run.stderr.startswith(said)
