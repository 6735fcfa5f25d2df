"""The sizes of published models by name. Plain data."""

from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, Experts, GroupedAttention, LatentAttention
from jdisagg.errors import ConfigError

# Sizes are from the config.json in the named Hugging Face repository; Llama-2 and BLOOM also from
# arXiv 2307.09288 and 2211.05100.
CATALOG: dict[str, CostGeometry] = {
    geometry.name: geometry
    for geometry in (
        # meta-llama/Llama-2-7b-hf and -70b-hf, codellama/CodeLlama-34b-Instruct-hf
        CostGeometry(
            "llama-2-7b", 4096, 32, 32000, GroupedAttention(32, 32, 128), 11008,
            context_tokens=4096,
        ),
        CostGeometry(
            "codellama-34b", 8192, 48, 32000, GroupedAttention(64, 8, 128), 22016,
            context_tokens=16384,
        ),
        CostGeometry(
            "llama-2-70b", 8192, 80, 32000, GroupedAttention(64, 8, 128), 28672,
            context_tokens=4096,
        ),
        # meta-llama/Meta-Llama-3-8B and -70B
        CostGeometry(
            "llama-3-8b", 4096, 32, 128256, GroupedAttention(32, 8, 128), 14336,
            context_tokens=8192,
        ),
        CostGeometry(
            "llama-3-70b", 8192, 80, 128256, GroupedAttention(64, 8, 128), 28672,
            context_tokens=8192,
        ),
        # meta-llama/Llama-3.1-8B and -70B
        CostGeometry(
            "llama-3.1-8b", 4096, 32, 128256, GroupedAttention(32, 8, 128), 14336,
            context_tokens=131072,
        ),
        CostGeometry(
            "llama-3.1-70b", 8192, 80, 128256, GroupedAttention(64, 8, 128), 28672,
            context_tokens=131072,
        ),
        # bigscience/bloom
        CostGeometry(
            "bloom-176b", 14336, 70, 250880, GroupedAttention(112, 112, 128), 57344,
            gated=False, tied=True, context_tokens=2048,
        ),
        # facebook/opt-13b and -66b; OPT-175B as in arXiv 2205.01068
        CostGeometry(
            "opt-13b", 5120, 40, 50272, GroupedAttention(40, 40, 128), 20480,
            gated=False, tied=True, context_tokens=2048,
        ),
        CostGeometry(
            "opt-66b", 9216, 64, 50272, GroupedAttention(72, 72, 128), 36864,
            gated=False, tied=True, context_tokens=2048,
        ),
        CostGeometry(
            "opt-175b", 12288, 96, 50272, GroupedAttention(96, 96, 128), 49152,
            gated=False, tied=True, context_tokens=2048,
        ),
        # 01-ai/Yi-34B, mistralai/Mistral-Nemo-Instruct-2407
        CostGeometry(
            "yi-34b", 7168, 60, 64000, GroupedAttention(56, 8, 128), 20480,
            context_tokens=4096,
        ),
        CostGeometry(
            "mistral-nemo-12b", 5120, 40, 131072, GroupedAttention(32, 8, 128), 14336,
            context_tokens=131072,
        ),
        # mistralai/Mixtral-8x22B-v0.1 and -8x7B-v0.1
        CostGeometry(
            "mixtral-8x22b", 6144, 56, 32000, GroupedAttention(48, 8, 128), 16384,
            experts=Experts(8, 2, 16384), expert_layers=56, context_tokens=65536,
        ),
        CostGeometry(
            "mixtral-8x7b", 4096, 32, 32000, GroupedAttention(32, 8, 128), 14336,
            experts=Experts(8, 2, 14336), expert_layers=32, context_tokens=32768,
        ),
        # Qwen/Qwen3-30B-A3B-Instruct-2507
        CostGeometry(
            "qwen3-30b-a3b", 2048, 48, 151936, GroupedAttention(32, 4, 128), 6144,
            experts=Experts(128, 8, 768), expert_layers=48, context_tokens=262144,
        ),
        # Qwen/Qwen3-235B-A22B
        CostGeometry(
            "qwen3-235b-a22b", 4096, 94, 151936, GroupedAttention(64, 4, 128), 12288,
            experts=Experts(128, 8, 1536), expert_layers=94, context_tokens=40960,
        ),
        # openai/gpt-oss-20b and -120b: every second layer has a window
        CostGeometry(
            "gpt-oss-20b", 2880, 24, 201088, GroupedAttention(64, 8, 64, 128, 12), 2880,
            experts=Experts(32, 4, 2880), expert_layers=24, context_tokens=131072,
        ),
        CostGeometry(
            "gpt-oss-120b", 2880, 36, 201088, GroupedAttention(64, 8, 64, 128, 18), 2880,
            experts=Experts(128, 4, 2880), expert_layers=36, context_tokens=131072,
        ),
        # deepseek-ai/DeepSeek-V3: MLA, the first three layers dense, one shared expert
        CostGeometry(
            "deepseek-v3", 7168, 61, 129280, LatentAttention(128, 1536, 512, 64, 128, 128), 18432,
            experts=Experts(256, 8, 2048, 2048, groups_of_token=4), expert_layers=58,
            context_tokens=163840, next_token_layers=1,
        ),
        # deepseek-ai/DeepSeek-V3.2: V3 with an indexer that selects 2,048 positions
        CostGeometry(
            "deepseek-v3.2", 7168, 61, 129280,
            LatentAttention(128, 1536, 512, 64, 128, 128, 64, 128, 2048), 18432,
            experts=Experts(256, 8, 2048, 2048, groups_of_token=4), expert_layers=58,
            context_tokens=163840, next_token_layers=1,
        ),
        # zai-org/GLM-5: as DeepSeek-V3.2 with 32 heads of the indexer
        CostGeometry(
            "glm-5", 6144, 78, 154880,
            LatentAttention(64, 2048, 512, 64, 192, 256, 32, 128, 2048), 12288,
            experts=Experts(256, 8, 2048, 2048), expert_layers=75, context_tokens=202752,
            next_token_layers=1,
        ),
        # zai-org/GLM-5.2: as GLM-5, but only 21 layers have an indexer
        CostGeometry(
            "glm-5.2", 6144, 78, 154880,
            LatentAttention(64, 2048, 512, 64, 192, 256, 32, 128, 2048, 57), 12288,
            experts=Experts(256, 8, 2048, 2048), expert_layers=75, context_tokens=202752,
            next_token_layers=1,
        ),
        # MiniMaxAI/MiniMax-M3 (text part): 57 layers with an indexer that selects 16 blocks of 128
        CostGeometry(
            "minimax-m3", 6144, 60, 200064,
            GroupedAttention(64, 4, 128, indexed_layers=57, index_dim=128, index_top=2048), 12288,
            experts=Experts(128, 4, 3072, 3072), expert_layers=57, context_tokens=524288,
        ),
        # Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-14B and -32B
        CostGeometry(
            "qwen2.5-7b", 3584, 28, 152064, GroupedAttention(28, 4, 128), 18944,
            context_tokens=32768,
        ),
        CostGeometry(
            "qwen3-14b", 5120, 40, 151936, GroupedAttention(40, 8, 128), 17408,
            context_tokens=40960,
        ),
        CostGeometry(
            "qwen3-32b", 5120, 64, 151936, GroupedAttention(64, 8, 128), 25600,
            context_tokens=40960,
        ),
        # Qwen/Qwen3.5-397B-A17B: every fourth layer has attention, the others are recurrent
        CostGeometry(
            "qwen3.5-397b-a17b", 4096, 60, 248320, GroupedAttention(32, 2, 256, gated=True), 1024,
            experts=Experts(512, 10, 1024, 1024, True), expert_layers=60, context_tokens=262144,
            linear=LinearAttention(45, 16, 64, 128, 128, 4),
        ),
        # MiniMaxAI/MiniMax-Text-01: every eighth layer has attention, the others are recurrent
        CostGeometry(
            "minimax-text-01", 6144, 80, 200064, GroupedAttention(64, 8, 128), 9216,
            experts=Experts(32, 2, 9216), expert_layers=80, context_tokens=10240000,
            linear=LinearAttention(70, 64, 64, 128, 128, 1, corrects=False),
        ),
        # MiniMaxAI/MiniMax-M2.5
        CostGeometry(
            "minimax-m2.5", 3072, 62, 200064, GroupedAttention(48, 8, 128), 1536,
            experts=Experts(256, 8, 1536), expert_layers=62, context_tokens=196608,
        ),
        # moonshotai/Kimi-K2.5, its language model: MLA, the first layer dense, one shared expert
        CostGeometry(
            "kimi-k2.5", 7168, 61, 163840, LatentAttention(64, 1536, 512, 64, 128, 128), 18432,
            experts=Experts(384, 8, 2048, 2048), expert_layers=60, context_tokens=262144,
        ),
        # moonshotai/Kimi-Linear-48B-A3B-Instruct: 7 of 27 layers have MLA, the others are recurrent
        CostGeometry(
            "kimi-linear-48b-a3b", 2304, 27, 163840,
            LatentAttention(32, 0, 512, 64, 128, 128), 9216,
            experts=Experts(256, 8, 1024, 1024), expert_layers=26, context_tokens=1048576,
            linear=LinearAttention(20, 32, 32, 128, 128, 4, gate_rank=128, channel_gates=True),
        ),
        # inclusionAI/Ling-3.0-flash: every sixth layer has MLA, the others are recurrent
        CostGeometry(
            "ling-3.0-flash", 2560, 42, 157184,
            LatentAttention(32, 0, 512, 64, 128, 128, head_gates=True), 6144,
            experts=Experts(512, 8, 768, 768, groups_of_token=4), expert_layers=40,
            context_tokens=262144, next_token_layers=1,
            linear=LinearAttention(35, 32, 32, 128, 128, 4, channel_gates=True),
        ),
        # LiquidAI/LFM3-1.7B: short convolutions, and attention in 11 layers, 5 with a window
        CostGeometry(
            "lfm3-1.7b", 2048, 24, 128000,
            GroupedAttention(16, 4, 128, 256, 5, head_gates=True), 7680,
            tied=True, context_tokens=128000,
            linear=LinearAttention(13, 4, 16, 0, 128, 7, corrects=False, short=True),
        ),
        # zai-org/GLM-4.6: the first three layers dense, one shared expert
        CostGeometry(
            "glm-4.6", 5120, 92, 151552, GroupedAttention(96, 8, 128), 12288,
            experts=Experts(160, 8, 1536, 1536), expert_layers=89, context_tokens=202752,
            next_token_layers=1,
        ),
        # Qwen/Qwen3.6-35B-A3B: every fourth layer has attention, the others are recurrent
        CostGeometry(
            "qwen3.6-35b-a3b", 2048, 40, 248320, GroupedAttention(16, 2, 256, gated=True), 512,
            experts=Experts(256, 8, 512, 512, True), expert_layers=40, context_tokens=262144,
            linear=LinearAttention(30, 16, 32, 128, 128, 4),
        ),
        # google/gemma-4-31B-it, its language model: every sixth layer attends to the whole context,
        # with heads of another size whose values are their keys
        CostGeometry(
            "gemma-4-31b", 5376, 60, 262144,
            GroupedAttention(32, 16, 256, 1024, 50, False, 4, 512, True), 21504,
            tied=True, context_tokens=262144,
        ),
        # google/gemma-4-E2B-it and E4B-it, their language models: the last 20 and 18 layers read KV
        # of an earlier layer, and each layer a row of a table for each token
        CostGeometry(
            "gemma-4-e2b", 1536, 35, 262144,
            GroupedAttention(
                8, 1, 256, 512, 28, False, 1, 512, full_query_heads=8, shared_layers=20,
                shared_windowed=16,
            ), 6144,
            tied=True, context_tokens=131072, token_inputs=256, doubled_ffn=20,
        ),
        CostGeometry(
            "gemma-4-e4b", 2560, 42, 262144,
            GroupedAttention(
                8, 2, 256, 512, 35, False, 2, 512, full_query_heads=8, shared_layers=18,
                shared_windowed=15,
            ), 10240,
            tied=True, context_tokens=131072, token_inputs=256,
        ),
        # models/tiny/llama and models/tiny/qwen3_moe of this repository
        CostGeometry(
            "tiny-llama", 128, 4, 1280, GroupedAttention(8, 4, 16), 320,
            tied=True, context_tokens=1024, next_token_layers=1,
        ),
        CostGeometry(
            "tiny-qwen3-moe", 128, 4, 1280, GroupedAttention(8, 4, 16), 320, tied=True,
            experts=Experts(8, 2, 64), expert_layers=4, context_tokens=1024,
        ),
    )
}  # fmt: skip


def geometry(name: str) -> CostGeometry:
    if name not in CATALOG:
        raise ConfigError(
            f"no model named {name!r} in the catalogue; it has {', '.join(sorted(CATALOG))}, or"
            " give a model directory"
        )
    return CATALOG[name]
