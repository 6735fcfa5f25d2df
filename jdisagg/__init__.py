"""jdisagg: LLM serving in JAX with prefill and decode on separate device meshes.

Importing this package imports neither JAX nor gRPC; each room below says in its header what it
knows. `docs/architecture.md` is the map."""

__version__ = "0.1.0"
