"""Checks hand-written kernels on the accelerator before any program is traced, and disables kernels
that fail.

Each kernel (`ops/optional_kernels.py`) runs once on small inputs in a child process, and its result
is compared with plain XLA. If the kernel does not compile, crashes the process, does not terminate
or gives a different result, plain XLA replaces it. The check uses fixed sizes. A kernel that fails
only at a model's own sizes makes the worker's warm-up fail. `--kernels=xla` then replaces all
kernels."""

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.errors import ConfigError
from jdisagg.layout.platforms import TPU_CHIPS, libtpu_variables
from jdisagg.ops.optional_kernels import (
    BLOCK_EXPERTS,
    CUDNN_ATTENTION,
    FILTERED_DRAW,
    KERNELS,
    KERNELS_OF,
    LATENT_ATTENTION,
    PAGED_ATTENTION,
    TPU_PREFILL,
    WGMMA_EXPERTS,
    switch_off,
)

log = logging.getLogger(__name__)

AUTO, XLA = "auto", "xla"
# Largest accepted difference between the results of a kernel and its XLA form in bfloat16, relative
# to the largest value.
BOUND = 0.02
SECONDS = 120.0  # for one kernel: its compilation, and the start of the process
CHILD = (sys.executable, "-m", "jdisagg.engine.kernel_check")
DRIVER = Path("/proc/driver/nvidia/version")

_failed: dict[str, str] = {}  # by this process's check

Probe = Callable[[], float]
"""Runs a kernel and its XLA form. Returns the largest relative difference."""


def choose_kernels(choice: str, *, accelerator: str, folder: str = "") -> dict[str, str]:
    """Switches off the kernels that are not chosen or fail their check.

    Args:
        choice: "auto" checks the accelerator's kernels, "xla" switches off all, and a list of names
            separated by commas switches off all others without a check.
        accelerator: JAX platform of the accelerator that the process uses, "gpu" or "tpu"; empty
            for none. Without one, no kernel is used.

    Returns:
        The reason for each kernel that failed. Raises ConfigError for an unknown name.
    """
    names = {name.strip() for name in choice.split(",")}
    if names not in ({AUTO}, {XLA}) and (unknown := sorted(names - set(KERNELS))):
        raise ConfigError(
            f"kernels: no kernel named {', '.join(unknown)}; give {AUTO}, {XLA}, or names of"
            f" {', '.join(KERNELS)}"
        )
    if names != {AUTO}:
        switch_off(set(KERNELS) - names)
        return {}
    if not accelerator:
        return {}
    names_of = KERNELS_OF[accelerator]
    failed = _stored(folder, partial(check_kernels, names_of), names_of)
    switch_off(failed)
    _failed.update(failed)
    for name, reason in failed.items():
        log.warning("kernel %s is replaced by its XLA form: %s", name, reason)
    return failed


def failed_kernels() -> tuple[str, ...]:
    return tuple([f"{name}: {reason}" for name, reason in _failed.items()])


def check_kernels(
    names: Sequence[str] = KERNELS, command: Sequence[str] = CHILD, seconds: float = SECONDS
) -> dict[str, str]:
    """Runs kernels in child processes and returns the reason for each kernel that failed."""
    failed: dict[str, str] = {}
    left = list(names)
    while left:
        output, end = _child([*command, *left], seconds * len(left))
        begun = ""
        for line in output.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                begun, reason = said["kernel"], said.get("reason")
                if reason is None:
                    continue
                if reason:
                    failed[begun] = reason
                left.remove(begun)
                begun = ""
        if not left:
            break
        # The child ended before it reported all results. The kernel that it had begun has failed,
        # or, if it had begun none, the first kernel without a result.
        lost = begun if begun in left else left[0]
        failed[lost] = end
        left.remove(lost)
    return failed


def _child(command: list[str], seconds: float) -> tuple[str, str]:
    chip = os.environ.get(TPU_CHIPS, "0").split(",")[0]
    environment = {**os.environ, **libtpu_variables([chip])}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return output, f"did not end within {seconds:.0f} s"
    last = errors.strip().splitlines()[-1:] or ["no message"]
    return output, f"ended its process with status {process.returncode} ({last[0][:200]})"


def run_probes(names: Sequence[str], probes: Mapping[str, Probe]) -> None:
    """Runs probes in this process, and prints a JSON object on one line before and after each. The
    first line names the kernel that begins. The second also has the reason of a failure, which is
    empty for a kernel that passed."""
    for name in names:
        print(json.dumps({"kernel": name}), flush=True)
        try:
            error = probes[name]()
            passed = error <= BOUND  # false for NaN
            reason = "" if passed else f"differs from its XLA form by {error:.2g} of its values"
        except Exception as raised:  # any error of a compiler or driver
            reason = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0][:200]}"
        print(json.dumps({"kernel": name, "reason": reason}), flush=True)


def _stored(
    folder: str, check: Callable[[], dict[str, str]], names: Sequence[str]
) -> dict[str, str]:
    if not folder:
        return check()
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    key = hashlib.sha256(f"{jax.__version__} {driver} {visible} {names}".encode())
    path = Path(folder).expanduser() / f"kernels-{key.hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return {str(name): str(reason) for name, reason in found.items() if name in KERNELS}
    failed = check()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(failed))
    return failed


# ---- probes, which run in the child process


def _difference(kernel: jax.Array, reference: jax.Array) -> float:
    ours, theirs = (np.asarray(value, np.float32) for value in (kernel, reference))
    return float(np.max(np.abs(ours - theirs)) / max(1e-6, float(np.max(np.abs(theirs)))))


def _random(*shape: int, seed: int) -> jax.Array:
    import jax

    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def decode_attention(*, interpret: bool = False) -> float:
    from jdisagg.ops import paged_attention, paged_attention_pallas

    k_PKSH, v_PKSH = (_random(6, 2, 64, 128, seed=seed) for seed in (1, 2))
    table_BN = jnp.array([[0, 2, 4], [1, 3, 5]], jnp.int32)
    differences: list[float] = []
    for positions_BQ in (jnp.array([[150], [20]]), jnp.array([[149, 150], [20, 21]])):
        q_TNH = _random(positions_BQ.size, 8, 128, seed=0)
        shared = (q_TNH, k_PKSH, v_PKSH, table_BN, positions_BQ.astype(jnp.int32))
        kernel = paged_attention_pallas.paged_attention(
            *shared, scale=0.1, window=None, interpret=interpret
        )
        reference = paged_attention.paged_attention(*shared, scale=0.1, implementation="gather")
        differences.append(_difference(kernel, reference))
    return max(differences)


def latent_attention(*, interpret: bool = False) -> float:
    from jdisagg.ops import latent_attention_pallas, paged_attention

    rank, rope = 512, 64
    pages_P1SR = _random(6, 1, 64, rank + rope, seed=1)
    table_BN = jnp.array([[0, 2, 4], [1, 3, 5]], jnp.int32)
    differences: list[float] = []
    for positions_BQ in (jnp.array([[150], [20]]), jnp.array([[149, 150], [20, 21]])):
        q_TNR = _random(positions_BQ.size, 16, rank + rope, seed=0)
        shared = (q_TNR, pages_P1SR, rank, table_BN, positions_BQ.astype(jnp.int32))
        kernel = latent_attention_pallas.latent_attention(
            *shared, scale=0.05, window=None, interpret=interpret
        )
        reference = paged_attention.gather_attention(*shared, scale=0.05, window=None)
        differences.append(_difference(kernel, reference))
    return max(differences)


def prefill_attention(*, platform: str = "gpu") -> float:
    from jdisagg.ops.prefill_attention import prefill_attention as attend

    q_TNH = _random(256, 8, 128, seed=0)
    k_TKH, v_TKH = (_random(256, 2, 128, seed=seed) for seed in (1, 2))
    segment_T = jnp.where(jnp.arange(256) < 160, 0, 1).astype(jnp.int32)
    positions_T = jnp.where(jnp.arange(256) < 160, jnp.arange(256), jnp.arange(256) - 160)
    shared = (q_TNH, k_TKH, v_TKH, segment_T, positions_T.astype(jnp.int32))
    kernel = attend(*shared, scale=0.1, platform=platform, rows=2)
    reference = attend(*shared, scale=0.1, platform="cpu", rows=2)
    return _difference(kernel, reference)


def tpu_prefill(*, interpret: bool = False) -> float:
    from jdisagg.ops.kv_pages import PastPages
    from jdisagg.ops.prefill_attention import first_key
    from jdisagg.ops.prefill_attention import prefill_attention as attend
    from jdisagg.ops.prefill_attention_tpu import attend as by_kernel

    segment_T = jnp.where(jnp.arange(256) < 160, 0, 1).astype(jnp.int32)
    positions_T = jnp.arange(256, dtype=jnp.int32) + jnp.where(segment_T == 0, 150, -160)
    table_RN = jnp.array([[0, 2, 4], [1, 3, 5]], jnp.int32)
    rows = (table_RN, jnp.array([150, 0], jnp.int32), jnp.int32(1))
    differences: list[float] = []
    for width, window in ((128, 100), (64, None)):
        past = PastPages(_random(6, 2, 64, width, seed=3), _random(6, 2, 64, width, seed=4), *rows)
        keys = (_random(256, 2, width, seed=1), _random(256, 2, width, seed=2))
        shared = (_random(256, 8, width, seed=0), *keys, segment_T, positions_T)
        how = {"scale": 0.1, "window": window, "sinks_N": _random(8, seed=5)}
        first_T = first_key(segment_T, window)
        kernel = by_kernel(
            *shared, first_T, past, cap=0.0, marked=False, interpret=interpret, **how
        )
        reference = attend(*shared, past, platform="tpu", rows=2, **how)
        differences.append(_difference(kernel, reference))
    return max(differences)


def expert_products(*, wgmma: bool = False, interpret: bool = False) -> float:
    import jax

    from jdisagg.ops import moe

    x_TD = _random(64, 256, seed=0)
    gate_EDF, up_EDF = (_random(8, 256, 256, seed=seed) * 0.1 for seed in (1, 2))
    down_EFD = _random(8, 256, 256, seed=3) * 0.1
    local_TJ = jax.random.randint(jax.random.key(4), (64, 2), 0, 8, jnp.int32)
    weights = moe.ExpertWeights(gate_EDF, up_EDF, down_EFD)
    kind = jax.devices()[0].device_kind if wgmma else ""
    kernel = moe.gpu_products(x_TD, local_TJ, weights, kind, interpret=interpret)
    reference = moe.block_products(x_TD, local_TJ, weights, 16)
    return _difference(kernel, reference)


def filtered_draw(*, interpret: bool = False) -> float:
    """Returns the share of rows whose tokens differ."""
    from jdisagg.ops.sampling import SamplingRows, sample

    count = 16
    rows = SamplingRows.unfiltered(count, temperature=0.8)._replace(
        top_k=jnp.array([0, 1, 5, 300] * 4, jnp.int32),
        top_p=jnp.array([1.0, 0.95, 0.5, 1e-6], jnp.float32).repeat(4),
    )
    logits_BV = _random(count, 20_000, seed=0).astype(jnp.float32)
    kernel = sample(logits_BV, rows, platform="gpu", interpret=interpret)
    return float(np.mean(np.asarray(kernel) != np.asarray(sample(logits_BV, rows))))


PROBES: dict[str, Probe] = {
    PAGED_ATTENTION: decode_attention,
    LATENT_ATTENTION: latent_attention,
    CUDNN_ATTENTION: prefill_attention,
    WGMMA_EXPERTS: partial(expert_products, wgmma=True),
    BLOCK_EXPERTS: expert_products,
    FILTERED_DRAW: filtered_draw,
    TPU_PREFILL: tpu_prefill,
}

if __name__ == "__main__":
    run_probes(sys.argv[1:], PROBES)
