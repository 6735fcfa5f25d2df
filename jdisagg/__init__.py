"""jdisagg: LLM serving in JAX with prefill and decode on separate device meshes.

Importing this package imports neither JAX nor gRPC. `docs/architecture.md` maps its folders, and
each folder's header states what it may import."""

__version__ = "0.1.0"
