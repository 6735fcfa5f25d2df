"""Workers in two processes hand over KV through shared memory: the one pair of processes of
README's line. `test_layouts.py` has the layouts and page sizes, in one process; `tests/transfer`
moves blocks between meshes of any layout through each backend."""

from pathlib import Path

import pytest

from jdisagg.client import Client
from models.tokenizer import Tokenizer
from tests.end_to_end.clusters import PROMPT, dense_greedy
from tests.end_to_end.process_clusters import all_free, cluster, wait_until
from tests.lanes import first_quick
from tests.shapes import CHUNK, DECODE, LLAMA, PREFILL

TOKENS = 14


@pytest.mark.parametrize(
    ("prefill", "decode", "pages"),
    first_quick([(PREFILL, DECODE, "8"), ("tp=4", "dp=2,tp=2", "16"), ("tp=1", "dp=4", "8")]),
)
def test_workers_of_two_processes_give_the_tokens_of_a_dense_pass(
    tmp_path: Path, prefill: str, decode: str, pages: str
) -> None:
    """Prompts of several chunks and of a part of one, alone and at once."""
    prompt = Tokenizer.from_directory(LLAMA).encode(PROMPT) * 4
    assert len(prompt) > CHUNK
    flags = ("--prefill_workers=1", "--decode_workers=1")
    layouts = (f"--prefill={prefill}", f"--decode={decode}", f"--set=decode.page_size={pages}")
    running = cluster(tmp_path, *flags, *layouts, xla_flags="--xla_backend_optimization_level=0")
    with running as served, Client(served.address) as client:
        for start in (len(prompt), 5):
            done = client.complete(
                token_ids=prompt[:start], max_tokens=TOKENS, ignore_eos=True, temperature=0
            )
            assert done.choices[0].token_ids == dense_greedy(LLAMA, prompt[:start], TOKENS)
            assert done.timings is not None and done.timings.kv_bytes_moved > 0
        wait_until(lambda: all_free(client, served.workers), "pages are not free once all is quiet")
        (path,) = next(one for one in client.status() if one.name == "decode-0").kv_channels
        assert path.endswith(" shared memory")
