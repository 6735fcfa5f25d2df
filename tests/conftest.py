"""Eight virtual CPU devices and a strict JAX for every test; `JAX_PLATFORMS=cuda` runs the same tests on a GPU.

Compiled programs are kept in a folder of the session's own, so that engines of the same shape are compiled once.
"""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()

import jax  # noqa: E402

from jdisagg.engine.compilation import use_compilation_cache  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
_cache = tempfile.TemporaryDirectory(prefix="jdisagg-programs-")
use_compilation_cache(_cache.name)
