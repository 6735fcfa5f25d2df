"""Holds families against Hugging Face transformers on random checkpoints of random configurations
(`tests/golden/random_configs.py`), beyond the committed fixtures.

    python -m tests.golden.compare [FAMILY ...] [--seeds=0:5] [--layouts=4] [--keep=DIR]

In the environment that makes the fixtures (`tests/golden/make.py`: torch, transformers), with this
project installed. Of each family and seed a model is drawn and saved in float32, float16 or
bfloat16, perhaps in the words of transformers 4, or loaded and saved again as text; transformers
says 64 greedy tokens, and the log-probability of each, after prompts of 1, 7, 63 and 700 tokens. A
dense forward pass of ours is compared with all of it. With `--layouts=N` so many pairs of layouts
that the model allows serve it besides, disaggregated, as do the chunked and the unified mode, all
prompts at once, and twice with so few pages that sequences are preempted. A difference is printed
with the configuration; the exit status says whether there was one."""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # pyright: ignore[reportMissingImports]

from jdisagg.config import Mode
from jdisagg.errors import JdisaggError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_config, load_model
from tests.end_to_end.clusters import LLAMA, config, running
from tests.golden.make import Variant, random_model, save_as_text, text_of
from tests.golden.published import to_legacy, to_published_kimi
from tests.golden.random_configs import CONFIGS, random_fields

PROMPTS, GREEDY_TOKENS = (1, 7, 63, 700), 64
TOLERANCE = 1e-4
# What a log-probability may differ by where logits are large, in parts of the largest logit. Logits
# are sums in float32: of 12 families, transformers' own differ from those in float64 by up to 1e-6
# of the largest logit, and ours by up to 2.4e-6. The largest was 4 in most, and 99 in one.
PART_OF_LARGEST = 1e-5
PAIRS = (
    ("tp=1", "tp=4"),
    ("tp=2", "dp=2"),
    ("tp=4,ep=4", "dp=2,tp=2,ep=4"),
    ("dp=2", "tp=2"),
    ("tp=4", "dp=4"),
    ("dp=2,tp=2,ep=2", "dp=4,ep=4"),
    ("tp=3", "tp=1"),
    ("tp=1", "tp=3"),
    ("tp=2,ep=2", "tp=1"),
    ("tp=1", "dp=2"),
)
FLAT_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Said:
    """Of one prompt, by transformers: the greedy tokens, their log-probabilities, and by how much
    each was the likeliest. `wide_GV` are the log-probabilities in float64: where scores of an
    indexer are nearly equal, float32 may select other positions."""

    prompt: list[int]
    greedy: list[int]
    logprobs_GV: np.ndarray
    wide_GV: np.ndarray
    largest_logit: float

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, PART_OF_LARGEST * self.largest_logit)

    @property
    def margins_G(self) -> np.ndarray:
        best_G2 = np.sort(self.logprobs_GV, axis=1)[:, -2:]
        return best_G2[:, 1] - best_G2[:, 0]


@torch.no_grad()
def said(
    model: torch.nn.Module, length: int, seed: int, vocabulary: int, *, selects: bool = False
) -> Said:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    prompt = torch.randint(3, vocabulary, (1, length), generator=generator)
    model = text_of(model)
    out = model(prompt, use_cache=True)
    greedy, logprobs, largest = [], [], 0.0
    for _ in range(GREEDY_TOKENS):
        largest = max(largest, float(out.logits[0, -1].abs().max()))
        logprobs.append(out.logits[0, -1].double().log_softmax(-1).numpy())
        greedy.append(int(logprobs[-1].argmax()))
        out = model(
            torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values, use_cache=True
        )
    logprobs_GV = np.stack(logprobs)
    wide_GV = logprobs_GV
    if selects:
        text = torch.cat((prompt, torch.tensor([greedy[:-1]])), dim=1)
        wide = model.double()(text, use_cache=False).logits[0, length - 1 :]
        wide_GV = wide.log_softmax(-1).numpy()
        model.float()
    return Said(prompt[0].tolist(), greedy, logprobs_GV, wide_GV, largest)


def checkpoint(family: str, seed: int, directory: Path) -> list[Said]:
    """Saved in the directory; what the model says."""
    fields = random_fields(family, seed)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    model = random_model(Variant(family, fields, dtype), seed, gain=1.0)
    model.set_experts_implementation("eager")  # the others want sizes that are multiples
    embedding = model.get_input_embeddings()
    if (padding := getattr(embedding, "padding_idx", None)) is not None:
        # transformers clears this row when it loads some families (youtu), also of a tied head
        embedding.weight.data[padding] = 0
    vocabulary = int(fields["vocab_size"])  # type: ignore[call-overload]
    selects = any(name.startswith("index_topk") for name in fields)
    expected = [said(model, length, seed, vocabulary, selects=selects) for length in PROMPTS]
    model.to(dtype).save_pretrained(
        directory, max_shard_size="5GB" if seed % 2 or family == "kimi_k25" else "60KB"
    )
    (directory / "generation_config.json").unlink(missing_ok=True)
    if seed % 4 == 1 and family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        save_as_text(directory)
    written = json.loads((directory / "config.json").read_text())
    rope = written.get("rope_parameters")
    if seed % 2 and isinstance(rope, dict) and rope.get("rope_type") in FLAT_ROPES:
        to_legacy(directory / "config.json")
    if family == "kimi_k25":
        to_published_kimi(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # any: ids go in and come out
        shutil.copy(LLAMA / file, directory / file)
    return expected


def dense_differences(directory: Path, expected: list[Said]) -> list[str]:
    """One forward pass over the longest text, on one device."""
    model = load_model(directory, Layout(), jax.devices()[:1]).model
    forward = jax.jit(lambda ids_T, at_T: model(ids_T, at_T, dense_causal_attend))
    wrong = []
    for each in expected:
        text = [*each.prompt, *each.greedy[:-1]]
        padded = np.zeros(max(PROMPTS) + GREEDY_TOKENS, np.int32)
        padded[: len(text)] = text
        logits_TV = np.asarray(forward(jnp.asarray(padded), jnp.arange(len(padded))))
        logits_GV = logits_TV[len(each.prompt) - 1 : len(text)].astype(np.float64)
        ours_GV = logits_GV - np.logaddexp.reduce(logits_GV, axis=1, keepdims=True)
        ours_GV = ours_GV[:, : each.logprobs_GV.shape[1]]
        off = max(
            min(
                np.abs(ours_V - theirs_GV[at]).max()
                for theirs_GV in (each.logprobs_GV, each.wide_GV)
            )
            for at, ours_V in enumerate(ours_GV)
        )
        if not off < each.tolerance:
            wrong.append(f"dense, prompt of {len(each.prompt)}: log-probabilities off by {off:.2g}")
    return wrong


async def served_differences(
    directory: Path, expected: list[Said], mode: Mode, prefill: str, decode: str, *, few: bool
) -> list[str]:
    """All prompts at once; `few`: with pages for some of them alone."""
    least = -(-(max(PROMPTS) + GREEDY_TOKENS) // 16)
    sizes = config(
        mode,
        prefill,
        decode,
        directory=directory,
        context=768,
        slots=4,
        chunk=128,
        pages=least + 5 if few else None,
        growth=1 if few else 64,
    )
    wrong, where = [], f"{mode.value} {prefill} -> {decode}" + (", few pages" if few else "")
    async with running(sizes) as run:
        requests = [
            run.request(
                each.prompt, f"r{at}", max_tokens=GREEDY_TOKENS, ignore_eos=True, logprobs=1
            )
            for at, each in enumerate(expected)
        ]
        done = await run.complete_all(requests)
        preempted = sum(status.preemptions for status in await run.cluster.status())
    for each, one in zip(expected, done, strict=True):
        tokens = one.tokens[0]
        same = next((i for i in range(GREEDY_TOKENS) if tokens[i] != each.greedy[i]), GREEDY_TOKENS)
        if same < GREEDY_TOKENS and each.margins_G[same] > each.tolerance:
            wrong.append(f"{where}, prompt of {len(each.prompt)}: parts at token {same}")
        ours = np.array([got.logprob for got in one.logprobs[0][:same]])  # type: ignore[attr-defined]
        off_S = np.minimum(
            *(
                np.abs(ours - theirs_GV[np.arange(same), each.greedy[:same]])
                for theirs_GV in (each.logprobs_GV, each.wide_GV)
            )
        )
        if same and not (off := off_S.max()) < each.tolerance:
            wrong.append(f"{where}, prompt of {len(each.prompt)}: logprobs off by {off:.2g}")
    print(f"    {where}: {preempted} preempted, {len(wrong)} differences", flush=True)
    return wrong


def allowed_pairs(directory: Path, count: int, seed: int) -> list[tuple[str, str]]:
    geometry = load_config(directory).geometry
    pairs = []
    for at in range(len(PAIRS)):
        pair = PAIRS[(at + seed) % len(PAIRS)]
        try:
            for layout in pair:
                Layout.parse(layout).check(geometry)
        except LayoutError:
            continue
        pairs.append(pair)
    return pairs[:count]


def compare(family: str, seed: int, layouts: int, directory: Path) -> list[str]:
    """What differs."""
    try:
        expected = checkpoint(family, seed, directory)
        wrong = dense_differences(directory, expected)
        if wrong or not layouts:
            return wrong
        pairs = allowed_pairs(directory, layouts, seed)
        runs = [(Mode.DISAGGREGATED, *pair, at == 0) for at, pair in enumerate(pairs)]
        one = pairs[-1][1] if pairs else "tp=1"
        runs += [(Mode.CHUNKED, one, one, False), (Mode.UNIFIED, one, one, True)]
        for mode, prefill, decode, few in runs:
            wrong += asyncio.run(
                served_differences(directory, expected, mode, prefill, decode, few=few)
            )
    except JdisaggError as error:
        return [f"refused: {error}"]
    except Exception:
        return [traceback.format_exc(limit=-6)]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--seeds", default="0:5", help="FIRST:END")
    parser.add_argument("--layouts", type=int, default=0, help="pairs that serve each model")
    parser.add_argument("--keep", type=Path, help="where checkpoints that differ are left")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    first, end = map(int, given.seeds.split(":"))
    failed = 0
    for family in given.families or CONFIGS:
        for seed in range(first, end):
            with tempfile.TemporaryDirectory() as folder:
                wrong = compare(family, seed, given.layouts, Path(folder))
                print(f"{family} {seed}: {'; '.join(wrong) or 'equal'}", flush=True)
                if wrong:
                    failed += 1
                    print(f"    {random_fields(family, seed)}", flush=True)
                if wrong and given.keep:
                    shutil.copytree(folder, given.keep / f"{family}-{seed}", dirs_exist_ok=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
