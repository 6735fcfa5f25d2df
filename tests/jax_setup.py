"""JAX for tests: strict, and with the shared folder of compiled programs.

`tests/conftest.py` imports this file before it collects a test file outside the folders in
`tests.lanes.WITHOUT_JAX`."""

import jax

from jdisagg.executor.program_cache import use_compilation_cache
from tests.programs import PROGRAMS

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
use_compilation_cache(str(PROGRAMS))
