"""JAX's persistent compilation cache, on by default in a user's cache folder."""

from pathlib import Path

import jax


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled programs in `directory` ('' switches it off). Programs are found again by content, versions and devices."""
    if not directory:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
