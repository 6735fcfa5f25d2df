"""Observability: metrics, traces, structured logs and the readiness canary.

Packages that are observed do not import this one. Instead, the code that assembles a process wraps
ports (interfaces of workers), meshes and the request path (`wrap.py`). This package imports neither
JAX nor gRPC."""
