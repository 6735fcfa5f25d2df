"""Reads the configuration of Nemotron-H, Nemotron Nano 2 and Nemotron 3. Each layer is one of
Mamba-2, attention without rotary positions, a feed-forward block, or experts. A pattern in
config.json gives the kind of each layer. Feed-forward blocks have a squared ReLU instead of a gate.
Experts are routed as in DeepSeek-V3, may have a narrower input and output width, and come with a
shared expert."""

from dataclasses import replace

from jdisagg.errors import CheckpointError
from jdisagg.ops.activations import SquaredRelu
from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig, MambaConfig
from models.glm4_moe import check_groups
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_hybrid import checked_mamba, hybrid_layers, read_kinds

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096, norm_epsilon=1e-5)
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Fields without effect here: of training, of chunking in other implementations, and fields that
# transformers ignores too.
_PASSED_OVER = (
    "chunk_size", "expand", "time_step_min", "time_step_max", "time_step_floor",
    "num_logits_to_keep", "rescale_prenorm_residual", "use_mamba_kernels", "attention_bias",
    "mamba_ssm_cache_dtype", "mamba_proj_bias", "moe_shared_expert_overlap",
    "mtp_layers_block_type", "mtp_hybrid_override_pattern",
)  # fmt: skip
# Fields of kinds of layers that a model may lack.
_OF_KINDS = (
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
    "use_conv_bias", "use_bias", "time_step_limit", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.pass_over(*_PASSED_OVER, *_OF_KINDS)
    hf = hf.renamed({"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"})
    for field, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if hf.raw(field) not in (None, only) and not hf.sizes_only:
            raise hf.error(field, f"must be {only!r}", "other activations are not supported")
    epsilon = hf.number("layer_norm_epsilon", 1e-5)
    for field in ("rms_norm_eps", "norm_eps"):
        if hf.number(field, epsilon) != epsilon:
            raise hf.error(field, f"must be layer_norm_epsilon={epsilon}, or absent", "correct it")
    field, kinds = _kinds(hf)
    named = hf.changed(
        num_hidden_layers=len(kinds),
        rms_norm_eps=epsilon,
        head_dim=hf.count("head_dim", hf.count("attention_head_dim", 128)),
    )
    config = read_decoder(named, DEFAULTS, activation="relu2")
    mixer, fed = LayerConfig(rotated=False, parts="mixer"), LayerConfig(parts="ffn")
    mamba = _mamba(hf, config) if "mamba" in kinds else None
    experts = _experts(hf) if "moe" in kinds else None
    layers = {
        "mamba": replace(mixer, mamba=mamba),
        "attention": mixer,
        "mlp": fed,
        "moe": replace(fed, experts=experts),
    }
    return replace(
        config,
        layers=hybrid_layers(hf, field, kinds, layers),
        mlp_bias=hf.flag("mlp_bias", False),
        mtp_aside=True,
    )


def _kinds(hf: HfConfig) -> tuple[str, tuple[str, ...]]:
    field, pattern = "layers_block_type", hf.raw("hybrid_override_pattern")
    kinds = read_kinds(hf, field, tuple(PATTERN.values()))
    if kinds is None:
        field = "hybrid_override_pattern"
        if not isinstance(pattern, str) or not pattern:
            raise CheckpointError(
                f"{hf.where}: needed field 'layers_block_type' or 'hybrid_override_pattern' is"
                " missing; take it from the model's published config.json"
            )
        if unknown := set(pattern) - set(PATTERN):
            raise hf.error(
                field, f"must be of {' '.join(PATTERN)}, not {min(unknown)!r}", "correct it"
            )
        kinds = tuple(PATTERN[each] for each in pattern)
    if hf.count("num_hidden_layers", len(kinds)) != len(kinds):
        raise hf.error("num_hidden_layers", f"must be {len(kinds)}, as in {field}", "correct it")
    return field, kinds


def _mamba(hf: HfConfig, config: DecoderConfig) -> MambaConfig:
    mamba = MambaConfig(
        heads=hf.count("mamba_num_heads", 128),
        head_dim=hf.count("mamba_head_dim", 64),
        groups=hf.count("n_groups", 8),
        state_dim=hf.count("ssm_state_size", 128),
        taps=hf.count("conv_kernel", 4, least=2),
        convolution_bias=hf.flag("use_conv_bias", True),
        bias=hf.flag("use_bias", False),
    )
    return checked_mamba(hf, mamba, config.attention.kv_heads, "n_groups")


def _experts(hf: HfConfig) -> ExpertConfig:
    if hf.count("n_shared_experts", 1, least=0) != 1 and not hf.sizes_only:
        raise hf.error("n_shared_experts", "must be 1", "others are not supported here")
    experts = ExpertConfig(
        hf.count("n_routed_experts", 8),
        hf.count("num_experts_per_tok", 2),
        hf.count("moe_intermediate_size", 7688),
        hf.flag("norm_topk_prob", True),
        shared_ffn=hf.count("moe_shared_expert_intermediate_size", 7688),
        scores="sigmoid",
        correction=True,
        groups=hf.count("n_group", 1),
        groups_per_token=hf.count("topk_group", 1),
        scaling=hf.number("routed_scaling_factor", 1.0),
        clamp=SquaredRelu(),
        latent=hf.count("moe_latent_size", 0, least=0),
    )
    return check_groups(hf, experts)
