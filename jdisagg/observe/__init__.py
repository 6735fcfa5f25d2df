"""Observability: metrics, timelines, structured logs and the readiness canary.

Observed packages do not know this one. Ports, meshes and the path are wrapped (`observer.py`) by
the code that assembles a process, and a process without an observer wraps nothing. Imports neither
JAX nor gRPC."""
