"""Makes tests/golden/embeddings.json: the embeddings that transformers gives for random checkpoints
of this folder by sentence-transformers' rules, computed here from its documentation.

    python -m tests.golden.make_embeddings

Run with transformers 5 and torch for CPUs, in an environment of its own, when checkpoints of this
folder are made anew."""

import json
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
NAMES = ("qwen3", "mistral_window", "llama_tied", "glm4", "qwen3_moe")
LENGTHS = (1, 3, 17, 60, 100)


def prompt(length: int) -> list[int]:
    return [3 + (7 * length + 11 * at + at * at) % 120 for at in range(length)]


def main() -> None:
    table = {}
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()
        rows = []
        for length in LENGTHS:
            with torch.no_grad():
                ids = torch.tensor([prompt(length)])
                hidden = model.model(input_ids=ids).last_hidden_state[0].double()
            last, mean = hidden[-1], hidden.mean(0)
            unit = {"last": last / last.norm(), "mean": mean / mean.norm()}
            cut = last[:8] / last[:8].norm()
            rows.append(
                {
                    "ids": prompt(length),
                    **{kind: [round(float(x), 7) for x in one] for kind, one in unit.items()},
                    "last_cut": [round(float(x), 7) for x in cut],
                    "last_raw": [round(float(x), 6) for x in last],
                }
            )
        table[name] = rows
    (HERE / "embeddings.json").write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
