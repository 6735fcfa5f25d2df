"""The cases of `gpu_programs` and `tpu_programs`: models, sizes, and the executor compiled."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.deviceless import (
    Copied,
    Counted,
    DevicelessPrograms,
    GpuPrograms,
    Report,
    TpuPrograms,
    missing,
    topology_meshes,
    without_a_device,
)
from benchmarks.gpu_devices import GPU_DEVICES
from benchmarks.tpu_devices import TPU_DEVICES, TpuDevice
from jdisagg.assembly import WorkerHost
from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode, PrefixConfig, WorkerConfig
from jdisagg.dispatch.ids import random_id
from jdisagg.engine.limits import mesh_limits
from jdisagg.engine.replica import mesh_role
from jdisagg.errors import JdisaggError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.prefill_program import chunk_forms
from jdisagg.executor.warm_up import warm_up_steps
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.ops.quantized_weights import checked_weights
from jdisagg.transfer.in_process import InProcessChannel
from jdisagg.worker.mesh_worker import WorkerContext
from models.catalog import read_config
from models.decoder import abstract_model
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig

_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "hidden_act": "silu",
}  # fmt: skip
_QWEN_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
    "hidden_act": "silu",
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu", "n_shared_experts": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "llama-3-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32
    },
    "llama-3-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64
    },
    "qwen3-30b-a3b": {
        **_QWEN_MOE, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": {
        **_QWEN_MOE, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    # a layer with state and one with attention
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "full_attention_interval": 2,
        "shared_expert_intermediate_size": 512, "rope_theta": 1e7, "tie_word_embeddings": False,
        "max_position_embeddings": 262144, "hidden_act": "silu",
    },
    # a layer with a window and one that sees everything
    "gpt-oss-120b": {**_GPT_OSS, "num_local_experts": 128},
    "gpt-oss-20b": {**_GPT_OSS, "num_local_experts": 32},
    "gemma-2-9b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "head_dim": 256,
        "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    # a layer with a window and one without, whose kv heads and head sizes differ
    "gemma-4-31b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "head_dim": 256,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # a dense layer and one with experts
    "glm-4.7-flash": {
        **_LATENT, "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048,
        "intermediate_size": 10240, "num_attention_heads": 20, "moe_intermediate_size": 1536,
    },
    "deepseek-v3": {
        **_LATENT, "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "num_attention_heads": 128, "moe_intermediate_size": 2048,
    },
    "kimi-k2.5": {
        **_LATENT, "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 7168,
        "intermediate_size": 18432, "num_attention_heads": 64, "moe_intermediate_size": 2048,
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    },
    "glm-4.6": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
        "intermediate_size": 12288, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
        "attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False,
        "max_position_embeddings": 202752, "hidden_act": "silu",
    },
    "minimax-m2.5": {
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072,
        "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64,
        "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True,
        "rope_theta": 5e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 196608, "hidden_act": "silu",
    },
}  # fmt: skip
DEVICES = GPU_DEVICES | TPU_DEVICES
WHAT = ("decode", "updates", "prefill", "blocks")
ROLES = {"": Mode.DISAGGREGATED, "prefill": Mode.DISAGGREGATED, "decode": Mode.DISAGGREGATED,
         "mixed": Mode.CHUNKED}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The programs to compile. Sizes are in tokens, rows of a batch, and pages of a rank. `role` is
    that of a worker, with the defaults of a worker; without one the mesh has all roles."""

    device: str = "h200"
    model: str = "llama-3-8b"
    layout: str = "dp=1,tp=1"
    layers: int = 2
    dtype: str = "bfloat16"
    weights: str = ""
    kv_dtype: str = ""
    batch: int = 32
    chunk: int = 2048
    block: int = 512
    context: int = 8192
    page: int = 64
    pages: int = 2048
    slots: int = 128
    window: int = 0
    what: str = ",".join(WHAT)
    role: str = ""

    def config(self) -> DecoderConfig:
        fields = {**MODELS[self.model], "num_hidden_layers": self.layers}
        config = replace(read_config(HfConfig(fields)), kv_dtype=self.kv_dtype)
        if not self.window:
            return config
        layers = tuple(replace(layer, window=self.window) for layer in config.layers)
        return replace(config, layers=layers)


def platform_of(device: str) -> str:
    """Returns the JAX platform of a device that can be described."""
    return "tpu" if device in TPU_DEVICES else "gpu"


def build(case: Case, report: Report) -> MeshExecutor:
    """Returns the executor of an instance that prefills, hands off and decodes, on meshes of
    described devices. The compiled programs are passed to `report`. If only some layers have a
    window and the case has no prefill, these layers have ring buffers, as on a decode worker."""
    layout, config, device = Layout.parse(case.layout), case.config(), DEVICES[case.device]
    platform = platform_of(case.device)
    layout.check(config.geometry)
    meshes = topology_meshes(device, layout, config.kv_heads)
    model = abstract_model(
        config,
        dtype=case.dtype,
        platform=platform,
        tp=layout.tp,
        weights=checked_weights(case.weights),
        staged=layout.pp > 1,
    )
    instance = InstanceConfig(
        layout=layout,
        page_size=case.page,
        pages_per_rank=case.pages,
        slots_per_rank=case.slots,
        chunk_tokens=case.chunk,
        min_chunk_tokens=min(case.chunk, 512),
        speculate="ngram" if "drafts" in case.what or case.role else "off",
    )
    apart = model.kv_spec.can_part and ROLES[case.role] is Mode.DISAGGREGATED
    limits = mesh_limits(
        instance,
        ROLES[case.role],
        model.kv_spec,
        case.context,
        layout.pp,
        platform,
        windows_apart=apart,
        rings=apart and "prefill" not in case.what,
    )
    role = MeshRole(prefill=True, decode=True, emit=True, extracts=True)
    if case.role:
        prefix = PrefixConfig(reuse=True, host_gib=1.0)
        context = WorkerContext(case.role, MonotonicClock(), random_id)
        worker = WorkerConfig(mode=ROLES[case.role], instance=instance, prefix=prefix)
        role = mesh_role(WorkerHost(context, WorkerRole[case.role.upper()], worker))
    table = config.vocabulary * config.width * jnp.dtype(case.dtype).itemsize // layout.tp

    def programs(mesh: Mesh) -> DevicelessPrograms:
        if isinstance(device, TpuDevice):
            return TpuPrograms(mesh, device, report, 0 if config.tied else table)
        return GpuPrograms(mesh, device, report)

    first, *later = map(programs, meshes)
    first.followed_by(later)
    channel = InProcessChannel(MonotonicClock())
    return MeshExecutor("deviceless", model, first, layout, limits, role, channel)


def compile_all(case: Case, report: Report) -> int:
    """Compiles the programs that the case names, by the executor's own warm-up. Returns the bytes
    of the pages on one device."""
    executor = build(case, report)
    try:
        executor.expect(executor.card)
        for what in case.what.split(","):
            _STEPS[what](executor, case)
        ranks_and_shards = executor.mesh.shape["dp"] * executor.mesh.shape["kv"]
        return executor.pool_bytes // ranks_and_shards
    finally:
        executor.close()


def _decode(executor: MeshExecutor, case: Case) -> None:
    executor.warm_decode(case.batch)


def _drafts(executor: MeshExecutor, case: Case) -> None:
    """Compiles the two programs of steps that verify drafts."""
    executor.warm_pair(case.batch, True)


def _pair(executor: MeshExecutor, case: Case) -> None:
    """Compiles the two programs of steps with grammars."""
    executor.warm_pair(case.batch, False)


def _updates(executor: MeshExecutor, case: Case) -> None:
    executor.warm_updates()


def _prefill(executor: MeshExecutor, case: Case) -> None:
    for form in chunk_forms(executor.limits, executor.platform):
        executor.warm_prefill(case.chunk, form)


def _blocks(executor: MeshExecutor, case: Case) -> None:
    bands = executor.limits.bands(case.block)
    executor.warm_insert(bands[0], case.block)
    executor.blocks.warm_extract(bands[0], case.block)
    for band, tokens in executor.limits.window_shapes()[-1:]:
        executor.warm_insert(band, tokens, KvKind.WINDOW)
        executor.blocks.warm_extract(band, tokens, KvKind.WINDOW)


def _start(executor: MeshExecutor, case: Case) -> None:
    """Compiles everything that a worker compiles before it is ready."""
    if case.role != "prefill":
        executor.constrain(GrammarCompiler(lambda: None))  # type: ignore[arg-type, return-value]
    for step in warm_up_steps(executor):
        step()


_STEPS: dict[str, Callable[[MeshExecutor, Case], None]] = {
    "decode": _decode,
    "drafts": _drafts,
    "pair": _pair,
    "updates": _updates,
    "prefill": _prefill,
    "blocks": _blocks,
    "start": _start,
}


def parser_of(doc: str | None, devices: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser of a `Case`, with the first line of `doc` as its description."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    parser.add_argument("--device", choices=sorted(devices), default=devices[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-8b")
    for field in Case.__dataclass_fields__.values():
        if field.name not in ("device", "model"):
            parser.add_argument(f"--{field.name}", default=field.default, type=type(field.default))
    return parser


def compiled_apart(case: Case, timeout: float = 3000.0) -> list[dict[str, Any]]:
    """Compiles what the case names in a process of its own. Returns the counts of its programs.

    Raises:
        RuntimeError: The process failed. The message ends with its output.
    """
    module = f"benchmarks.{platform_of(case.device)}_programs"
    command = [sys.executable, "-m", module]
    command += [f"--{name}={getattr(case, name)}" for name in Case.__dataclass_fields__]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def print_counts(case: Case, parser: argparse.ArgumentParser) -> None:
    """Compiles what the case names, and prints a JSON line for each program."""
    if unknown := sorted(set(case.what.split(",")) - set(_STEPS)):
        parser.error(f"--what: {', '.join(unknown)} is none of {', '.join(_STEPS)}")
    if case.role not in ROLES:
        parser.error(f"--role={case.role}: one of prefill, decode, mixed")
    if not 0 < case.batch <= case.slots:
        parser.error(f"--batch={case.batch} must be in [1, {case.slots}], the --slots")
    if why := missing(platform_of(case.device)):
        sys.exit(why)
    without_a_device()
    which = {key: getattr(case, key) for key in ("device", "model", "layout", "layers")}
    which |= {
        key: getattr(case, key)
        for key in ("window", "weights", "kv_dtype", "role")
        if getattr(case, key)
    }
    found: list[Counted] = []

    def shown(counted: Counted | Copied) -> None:
        if isinstance(counted, Counted):
            found.append(counted)
        print(json.dumps({**asdict(counted), **which}), flush=True)

    try:
        compile_all(case, shown)
        traced = sum(program.trace_seconds for program in found)
        compiled = sum(program.compile_seconds for program in found)
        print(
            f"{len(found)} programs, processor seconds: {traced:.1f} of tracing,"
            f" {compiled:.1f} of compilation, {time.process_time():.1f} of the process"
        )
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")
