"""JAX's persistent compilation cache, on by default in a user's cache folder."""

import jax

from jdisagg.folders import made_folder


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled programs in `directory` ('' switches it off). Programs are found again by content, versions and devices. Raises
    ConfigError for a folder that cannot be made."""
    if not directory:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    path = made_folder("compilation_cache", directory, "name a folder that can be written, or '' to keep no programs")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
