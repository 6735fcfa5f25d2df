"""Makes tests/golden/adapters: a random LoRA adapter of some golden checkpoints, and the logits of
the checkpoint into which PEFT merges it. Needs torch, transformers and peft:

    python tests/golden/make_adapters.py

Each folder holds adapter_config.json, adapter_model.safetensors and expected.npz (prompt ids, and
logits of each position)."""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
# The fields of each adapter's configuration.
ADAPTERS: dict[str, dict[str, object]] = {
    "llama_tied": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": DENSE,
        "rank_pattern": {"down_proj": 2, r"layers\.0\..*q_proj": 3},
        "alpha_pattern": {"o_proj": 1},
    },
    "phi3": {"r": 3, "use_rslora": True, "target_modules": "all-linear"},
    "qwen3_moe": {"r": 2, "target_modules": ATTENTION, "target_parameters": EXPERTS},
    "deepseek_v3": {"r": 3, "target_modules": [*LATENT, "gate_proj", "up_proj", "down_proj"]},
}
PROMPT = 24


def main(names: list[str]) -> None:
    for name in names or list(ADAPTERS):
        torch.manual_seed(sum(name.encode()))
        model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32)
        config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **ADAPTERS[name])  # type: ignore[arg-type]
        adapted = get_peft_model(model, config)
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                fan = parameter.shape[-1]
                torch.nn.init.normal_(parameter, std=(0.7 if "lora_B" in key else 1) / fan**0.5)
        folder = HERE / "adapters" / name
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        prompt = torch.randint(3, model.config.vocab_size, (1, PROMPT))
        with torch.no_grad():
            before = adapted(prompt).logits[0]
            merged = adapted.merge_and_unload()
            logits = merged(prompt).logits[0]
        assert (before - logits).abs().max() < 1e-3, (name, (before - logits).abs().max())
        np.savez_compressed(
            folder / "expected.npz", prompt=prompt[0].numpy(), logits=logits.numpy()
        )
        print(name, folder, float(logits.abs().max()))


if __name__ == "__main__":
    main(sys.argv[1:])
