"""Observability: metrics, timelines, structured logs and the readiness canary.

Observed packages do not import this one. The code that assembles a process wraps ports, meshes and
the request path (`wrap.py`). A process without an observer wraps nothing. Imports neither JAX nor
gRPC."""
