"""Rewrites a checkpoint that transformers saved into the form in which its family is published, or
which earlier versions of transformers wrote. Mends models where transformers departs from published
code."""

import json
import re
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file
from transformers.models.minimax.modeling_minimax import MiniMaxCache  # pyright: ignore[reportMissingImports]


def mend(model: torch.nn.Module) -> None:
    for module in model.modules():
        # transformers 5.23 bounds steps from below by time_step_min in prompts, and not in steps;
        # published code has time_step_limit (huggingface/transformers pull request 48989).
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)
    # transformers 5.24 counts the keys of the first layer, which has none in MiniMax-Text-01, so
    # that each cached step is at position 0.
    MiniMaxCache.get_seq_length = lambda self, layer_idx=0: max(
        (layer.get_seq_length() for layer in self.layers), default=0
    )


def to_published_kimi(directory: Path) -> None:
    """Names as moonshotai has them: transformers 5.23 renames the text part's layers, too, where it
    means those of the eyes."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    named = {name.replace("model.blocks.", "model.layers."): each for name, each in tensors.items()}
    save_file(named, path, {"format": "pt"})
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    fields["architectures"] = ["KimiK25ForConditionalGeneration"]
    fields["text_config"] |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    path.write_text(json.dumps(fields, indent=2) + "\n")


def to_published_minimax(directory: Path) -> None:
    """Names and fields of MiniMax-Text-01 and M1 as MiniMaxAI has them, without decays."""
    path = directory / "model.safetensors"
    decays = re.compile(r"(slope_rate|_decay)$")
    kept = {name: each for name, each in load_file(path).items() if not decays.search(name)}
    save_file(kept, path, {"format": "pt"})
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    for name in [name for name in fields if name.endswith("_factor")]:
        own = name.removesuffix("_factor").replace("_attn_", "_attention_")
        fields[f"layernorm_{own}"] = fields.pop(name)
    kinds = fields.pop("layer_types")
    fields["attn_type_list"] = [int(kind == "full_attention") for kind in kinds]
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    del fields["block_size"]
    fields |= {"postnorm": True, "rotary_dim": fields["head_dim"], "shared_moe_mode": "sigmoid"}
    called = {"minimax_m1": "MiniMaxM1ForCausalLM"}.get(directory.name, "MiniMaxText01ForCausalLM")
    fields |= {"shared_intermediate_size": 0, "architectures": [called]}
    path.write_text(json.dumps(fields, indent=2) + "\n")


def to_published_minimax_m3(directory: Path) -> None:
    """Fields of the text part as MiniMaxAI has them."""
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    text = fields["text_config"]
    kinds = [int(kind != "full_attention") for kind in text.pop("layer_types")]
    names = ("num_index_heads", "index_dim", "block_size", "topk_blocks", "local_block")
    ours = ("n_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")
    sizes = {f"sparse_{a}": text.pop(f"index_{b}") for a, b in zip(names, ours, strict=True)}
    kept = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
    layers = {"sparse_attention_freq": kinds, "sparse_disable_index_value": kinds}
    rope = text.pop("rope_parameters")
    text |= {"sparse_attention_config": sizes | kept | layers, "hidden_act": "swigluoai"}
    text |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")}
    text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
    text |= {"scoring_func": "sigmoid", "use_routing_bias": True, "use_gemma_norm": True}
    text |= {"use_qk_norm": True, "qk_norm_type": "per_head", "n_shared_experts": 1}
    path.write_text(json.dumps(fields, indent=2) + "\n")


def to_published_kimi_linear(directory: Path) -> None:
    """Names and fields as moonshotai has them: transformers 5.23 saves dense blocks under the name
    of the experts, and adds fields of its own."""
    path, old = directory / "model.safetensors", ".block_sparse_moe."
    named = {
        name.replace(old, ".mlp.") if re.search(r"moe\.\w+_proj", name) else name: each
        for name, each in load_file(path).items()
    }
    save_file(named, path, {"format": "pt"})
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    for name in list(fields):
        if name.startswith(("linear_num", "linear_head", "linear_conv", "layer_types", "mlp_")):
            del fields[name]
    fields |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    fields |= {"use_grouped_topk": True, "rope_theta": 10000.0, "rope_scaling": None}
    path.write_text(json.dumps(fields, indent=2) + "\n")


def to_legacy(path: Path) -> None:
    """Rewrites rope_parameters as transformers 4 had it."""
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(fields, indent=2) + "\n")
