"""Makes the golden fixtures: tiny random checkpoints of every family, with logits and greedy tokens
of Hugging Face transformers.

Run in an environment of its own, never at test time (BUILD.md): `pip install torch==2.13.0
transformers==5.24.0`, then `python -m tests.golden.make`. Each folder gets config.json, the
weights, and expected.npz (prompt ids, logits of each prompt position, 64 greedy tokens with the
cache). Computed in float32 from weights rounded to the stored dtype. Weights are large enough that
greedy margins are far above float noise: a seed whose smallest margin is under 0.01, or that
repeats itself, is passed over. Names given as arguments make those fixtures alone."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
    VoxtralForConditionalGeneration,
)  # pyright: ignore[reportMissingImports]

from tests.golden.mxfp4 import draw_mxfp4, kept_experts, to_mxfp4
from tests.golden.published import (
    mend,
    to_legacy,
    to_published_kimi,
    to_published_kimi_linear,
    to_published_minimax,
    to_published_minimax_m3,
)

HERE = Path(__file__).parent
PROMPT_TOKENS, GREEDY_TOKENS, LEAST_MARGIN, LEAST_DIFFERENT = 24, 64, 0.01, 20
TABLES = yaml.safe_load((HERE / "variants.yaml").read_text())
COMMON, EYES, BESIDE_EYES = (TABLES[name] for name in ("common", "eyes", "beside_eyes"))


@dataclass(frozen=True)
class Variant:
    """A checkpoint of variants.yaml, which says what the fields are."""

    family: str
    fields: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    legacy: bool = False
    called: str = ""
    shard_size: str = "5GB"
    mxfp4: bool = False
    resaved: bool = False


def _variant(dtype: str = "bfloat16", **fields: Any) -> Variant:
    return Variant(dtype=getattr(torch, dtype), **fields)


VARIANTS = {name: _variant(**fields) for name, fields in TABLES["variants"].items()}


def make(name: str, variant: Variant) -> None:
    """Writes one fixture's folder anew."""
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    for seed in range(200):
        model = random_model(variant, seed)
        prompt, logits, greedy, margin = reference(model, seed)
        if margin >= LEAST_MARGIN and len(set(greedy.tolist())) >= LEAST_DIFFERENT:
            break
    else:
        raise SystemExit(
            f"{name}: no seed gives margins of {LEAST_MARGIN} and {LEAST_DIFFERENT} different"
            " tokens"
        )
    kept = kept_experts(model) if variant.mxfp4 else {}
    model.to(variant.dtype).save_pretrained(directory, max_shard_size=variant.shard_size)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if variant.resaved:
        save_as_text(directory)
    if variant.mxfp4:
        to_mxfp4(directory, kept)
    if variant.family == "kimi_k25":
        to_published_kimi(directory)
    if variant.family == "minimax_m3_vl":
        to_published_minimax_m3(directory)
    if "linear_attn_config" in variant.fields:
        to_published_kimi_linear(directory)
    if variant.called.startswith("minimax"):
        to_published_minimax(directory)
    if variant.called:
        path = directory / "config.json"
        path.write_text(path.read_text().replace(f'"{variant.family}"', f'"{variant.called}"'))
    if variant.legacy:
        to_legacy(directory / "config.json")
    np.savez_compressed(directory / "expected.npz", prompt=prompt, logits=logits, greedy=greedy)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{name}: seed {seed}, smallest margin {margin:.3f}, {len(set(greedy.tolist()))} different"
        f" tokens, {size} bytes"
    )


def random_model(variant: Variant, seed: int, gain: float = 1.6) -> torch.nn.Module:
    """Weights drawn anew, rounded to the stored dtype, computed with in float32. `gain`: of a
    matrix; beyond one, float noise grows with the layers, and margins do."""
    torch.manual_seed(seed)
    fields = COMMON | dict(variant.fields)
    if (eyes := EYES.get(variant.family)) is None:
        config = AutoConfig.for_model(variant.family, **fields)
        # transformers 5.23 gives Mistral 4 no automatic class for text
        made = (
            Mistral4ForCausalLM
            if variant.family == "mistral4"
            else AutoModelForCausalLM.from_config
        )
        model = made(config).eval()
    else:
        if "out_hidden_size" in eyes:
            eyes = eyes | {"out_hidden_size": fields["hidden_size"]}
        part = "audio_config" if variant.family == "voxtral" else "vision_config"
        config = AutoConfig.for_model(
            variant.family,
            text_config=fields,
            **{part: eyes},
            tie_word_embeddings=False,
            **BESIDE_EYES.get(variant.family, {}),
        )
        speech = variant.family == "voxtral"
        made = (
            VoxtralForConditionalGeneration if speech else AutoModelForImageTextToText.from_config
        )
        model = made(config).eval()
    mend(model)
    stored = ("correction_bias", "expert_bias", "layer_scalar")
    buffers = [each for each in model.named_buffers() if each[0].endswith(stored)]
    added_to_one = variant.family.startswith(("gemma", "minimax_m3", "step3p"))
    added_to_one &= not variant.family.startswith("gemma4")
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *buffers]:
            if "norm" in name or name.endswith(("scale", "layer_scalar")):
                least = -0.5 if added_to_one else 0.5
                weight.uniform_(least, least + 1)
            elif name.endswith("A_log"):
                weight.uniform_(-4.0, 1.0)  # some heads remember long
            elif name.endswith("dt_bias"):
                weight.uniform_(-4.0, 1.0)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            elif "embed_tokens" in name or name == "model.embeddings.weight":
                weight.normal_(std=0.7)
            else:
                weight.normal_(std=gain / weight.shape[-1] ** 0.5)
            weight.copy_(weight.to(variant.dtype).float())
    if variant.mxfp4:
        draw_mxfp4(model)
    return model.float()


def save_as_text(directory: Path) -> None:
    """Loaded and saved by the class of causal language models: a text part keeps its names."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    for path in directory.iterdir():
        path.unlink()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


def text_of(model: torch.nn.Module) -> torch.nn.Module:
    """The part that gives logits without images: transformers 5.24 fails on Llama 4 without any."""
    is_llama = type(model).__name__ == "Llama4ForConditionalGeneration"
    return model.language_model if is_llama else model


@torch.no_grad()
def reference(
    model: torch.nn.Module, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Prompt, its logits, the greedy tokens that follow, and the smallest margin by which one was
    chosen."""
    prompt = torch.randint(
        3, COMMON["vocab_size"], (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed)
    )
    model = text_of(model)
    out = model(prompt, use_cache=True)
    logits, greedy, margin = out.logits[0].numpy(), [], float("inf")
    for _ in range(GREEDY_TOKENS):
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        out = model(best.indices[None, :1], past_key_values=out.past_key_values, use_cache=True)
    return prompt[0].numpy().astype(np.int32), logits, np.array(greedy, np.int32), margin


if __name__ == "__main__":
    for variant_name in sys.argv[1:] or VARIANTS:
        make(variant_name, VARIANTS[variant_name])
