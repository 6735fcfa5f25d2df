"""Makes tests/golden/assistants: random Gemma 4 assistants for golden checkpoints of Gemma 4, and
what transformers drafts with them. Needs the environment of `tests/golden/make.py`:

    python -m tests.golden.make_assistants

Each folder holds config.json, the weights, and expected.npz: for each place in the checkpoint's
greedy stream (`places`: number of tokens), the tokens that the candidate generator of transformers
drafts after them (`drafts`), and for some of the places the logits of these drafts (`of_logits`:
their indices, `logits`). A token that its generator masks has -inf."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator  # pyright: ignore[reportMissingImports]

from tests.golden.arrays import arrays_of

HERE = Path(__file__).parent
CHAIN, LEAST_MARGIN, EACH = 3, 0.002, 7
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
# By name: the checkpoint, the family, and fields beside those of the checkpoint.
ASSISTANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clusters": (
        "gemma4_clusters",
        "gemma4_assistant",
        {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 5},
    ),
    "unified": ("gemma4_unified", "gemma4_unified_assistant", {}),
}
SAME = (
    "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window",
    "rope_parameters", "rms_norm_eps", "max_position_embeddings", "attention_k_eq_v",
    "attention_bias",
)  # fmt: skip


def main() -> None:
    for name, (of, family, fields) in ASSISTANTS.items():
        target = AutoModelForCausalLM.from_pretrained(HERE / of, dtype=torch.float32).eval()
        known = arrays_of(HERE / of / "expected.npz")
        tokens = torch.tensor(np.concatenate((known["prompt"], known["greedy"])))[None]
        for seed in range(200):
            assistant = random_assistant(target, family, fields, seed)
            found = drafted(target, assistant, tokens)
            if found["margin"] >= LEAST_MARGIN and len(np.unique(found["drafts"])) > 20:
                break
        else:
            raise SystemExit(f"{name}: no seed gives margins of {LEAST_MARGIN}")
        folder = HERE / "assistants" / name
        shutil.rmtree(folder, ignore_errors=True)
        assistant.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        margin = found.pop("margin")
        np.savez_compressed(folder / "expected.npz", **found)
        print(f"{name}: seed {seed}, smallest margin {margin:.4f}")


def random_assistant(target: Any, family: str, fields: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    own = target.config.get_text_config().to_dict()
    text = {name: own[name] for name in SAME if name in own} | {
        "model_type": own["model_type"],
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": len(KINDS),
        "layer_types": KINDS,
        "num_kv_shared_layers": len(KINDS),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "per_layer_config": {
            at: dict(next(iter(own["per_layer_config"].values())))
            for at, kind in enumerate(KINDS)
            if kind == "full_attention"
        },
    }
    config = AutoConfig.for_model(
        family, text_config=text, backbone_hidden_size=own["hidden_size"], **fields
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    buffers = [each for each in model.named_buffers() if each[0].endswith("layer_scalar")]
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *buffers]:
            if "norm" in name or name.endswith("layer_scalar"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=1.3 / weight.shape[-1] ** 0.5)
            weight.copy_(weight.to(torch.bfloat16).float())
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(own["vocab_size"]))
    return model


@torch.no_grad()
def drafted(target: Any, assistant: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Drafts of transformers' own candidate generator after each token: it is given the model's
    outputs of a decode step with the token before. (After a prefill or a rejected draft, its
    attention also covers a position before the window, or the rejected draft's.)"""
    places, drafts, logits, margin, cache = [], [], [], float("inf"), None
    for count in range(2, tokens.shape[1] + 1):
        out = target(
            tokens[:, count - 2 : count - 1],
            cache=cache,
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=True,
        )
        cache = out.cache
        generator = SinglePositionMultiTokenCandidateGenerator(
            input_ids=tokens[:, :count],
            assistant_model=assistant,
            target_model_input_embeddings=target.get_input_embeddings(),
            generation_config=target.generation_config,
            model_kwargs={},
            eos_token_id=-1,
        )
        generator.num_assistant_tokens = CHAIN
        generator.main_model_max_length = 10_000
        ids, of_drafts = generator.get_candidates(
            tokens[:, :count],
            model_kwargs={},
            model_outputs=SimpleNamespace(
                hidden_states=out.hidden_states, shared_kv_states=out.shared_kv_states
            ),
            is_first_iteration=False,
            n_last_matches=0,
        )
        best = of_drafts[0].topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        places.append(count)
        drafts.append(ids[0, count:].numpy())
        logits.append(of_drafts[0].numpy())
    kept = np.arange(0, len(places), EACH)
    of_logits = np.stack([logits[at] for at in kept])
    if assistant.masked_embedding is not None:
        lowest = of_logits.min(axis=-1, keepdims=True)
        of_logits = np.where(of_logits == lowest, -np.inf, of_logits)
    return {
        "margin": margin,
        "places": np.array(places, np.int32),
        "drafts": np.stack(drafts).astype(np.int32),
        "of_logits": kept.astype(np.int32),
        "logits": of_logits.astype(np.float32),
    }


if __name__ == "__main__":
    main()
