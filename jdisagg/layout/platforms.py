"""Requirements of each JAX platform on programs, arrays, batches and processes: the only table of
differences between CPU, GPU and TPU. The entries for CPUs and GPUs are based on measurements in
benchmarks/LOG.md, those for TPUs on benchmarks/results/tpu_programs.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jdisagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlatformTraits:
    """The requirements of one platform.

    Attributes:
        stores_bits: Whether types of fewer than 32 bits are emulated: bfloat16 and fp8 arrays are
            stored as their bits, int4 as pairs, and bfloat16 products have a separate
            implementation.
        without_loops: Whether programs avoid loops, because the host would drive them.
        float32_precision: Precision at which float32 matrices are multiplied as float32. None means
            the platform's default.
        row_major: Whether weights and pages are row-major at the border of every program. XLA's
            default layout for a TPU makes the page number the innermost axis where a head is
            narrower than 128 lanes, and every program would copy the pool into another layout and
            back.
        whole_pages: Whether pages are read whole, and heads are indexed one by one. A TPU stores
            tiles of (8, 128) of an array's last two axes, so that reading rows of another shape
            would copy the pool.
        kernels: Which hand-written kernels apply: the GPU's with cuDNN, the TPU's, or none.
        inserts_whole: Whether a received block is written by one scatter, not run by run.
        argmax_in_blocks: Whether the largest logit is searched in blocks of 128. On a TPU, forming
            such blocks would copy the logits.
        least_batch: Rows of the smallest decode batch.
        draft_rows: Number of extra rows for drafts that each sequence may have in a decode step. On
            a CPU each extra row takes time.
        spare_rows: Whether a few more rows in a step take almost no time.
        lanes: Number to a multiple of which the last axis of a page array is padded in memory.
        limit_has_fraction: Whether the memory limit that JAX reports already contains
            `memory_fraction`.
        autotunes: Whether XLA times kernels and chooses among them, so that processes may choose
            differently.
        compiler_options: XLA's options of all programs. Options that this version of XLA does not
            have are left out.
    """

    stores_bits: bool = False
    without_loops: bool = False
    float32_precision: Literal["highest"] | None = None
    row_major: bool = False
    whole_pages: bool = False
    decode_attention: Literal["loop", "gather", "pages"] = "loop"
    experts: Literal["blocks", "ragged"] = "blocks"
    kernels: Literal["", "gpu", "tpu"] = ""
    inserts_whole: bool = False
    argmax_in_blocks: bool = True
    least_batch: int = 1
    draft_rows: int = 1
    spare_rows: bool = False
    warm_runs: int = 1
    least_page: int = 1
    lanes: int = 1
    limit_has_fraction: bool = False
    autotunes: bool = False
    compiler_options: tuple[tuple[str, str | bool], ...] = ()
    float32_options: tuple[tuple[str, str | bool], ...] = ()


# Default fraction of an accelerator's memory that an instance may use.
DEVICE_FRACTION = 0.9

_TRAITS = {
    "cpu": PlatformTraits(stores_bits=True),
    "gpu": PlatformTraits(
        without_loops=True,
        float32_precision="highest",  # the default is TF32, with a mantissa of 10 bits
        decode_attention="gather",
        experts="ragged",
        kernels="gpu",
        inserts_whole=True,
        least_batch=8,  # a single row takes another kernel, with other rounding
        draft_rows=3,
        spare_rows=True,
        warm_runs=3,
        autotunes=True,
        limit_has_fraction=True,  # XLA_CLIENT_MEM_FRACTION
        # Autotuning is off, because XLA would compile and time several forms of every kind of
        # fusion. The unrolled passes of a sampling program have hundreds of fusions. With
        # autotuning, one such program compiled for more than 98 s on an H100.
        compiler_options=(("xla_gpu_experimental_enable_fusion_autotuner", False),),
        # In full float32 precision Triton's products use no tensor cores, and each of many
        # candidates takes seconds to compile.
        float32_options=(("xla_gpu_enable_triton_gemm", False),),
    ),
    "tpu": PlatformTraits(
        float32_precision="highest",  # the default is one pass in bfloat16
        row_major=True,
        whole_pages=True,
        decode_attention="pages",
        experts="ragged",
        kernels="tpu",
        inserts_whole=True,
        argmax_in_blocks=False,
        least_batch=8,  # rows of a tile; fewer programs to compile
        draft_rows=3,
        spare_rows=True,
        lanes=128,
        least_page=32,  # rows of a tile of 8-bit values
        # In loops of a v7x, 16-bit arrays would have tiles of 16 rows, and a loop over experts
        # would copy the weights, whose tiles have 8 rows at the border of a program.
        compiler_options=(("xla_tpu_control_large_2nd_minor_layout_for_x16", "false"),),
    ),
}


TPU_CHIPS = "TPU_VISIBLE_CHIPS"
# The shape in which libtpu arranges the chips of a process, by their number.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def libtpu_variables(chips: Sequence[int | str]) -> dict[str, str]:
    """Returns the environment variables with which a process uses only the given TPU chips of its
    host, without waiting for other processes. Raises ConfigError if libtpu does not support this
    number of chips."""
    if len(chips) not in _BOUNDS:
        raise ConfigError(
            f"--gpus: a worker's number of TPU chips must be one of"
            f" {', '.join(map(str, _BOUNDS))}, got {len(chips)}; choose another layout, or set"
            " --gpus_per_worker"
        )
    return {
        TPU_CHIPS: ",".join(map(str, chips)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def traits_of(platform: str) -> PlatformTraits:
    """Returns the requirements of a JAX platform. Raises ConfigError if the platform is not
    supported."""
    if platform not in _TRAITS:
        raise ConfigError(
            f"platform {platform!r} is not supported: jdisagg runs on {', '.join(_TRAITS)}; set"
            " JAX_PLATFORMS to one of them"
        )
    return _TRAITS[platform]
