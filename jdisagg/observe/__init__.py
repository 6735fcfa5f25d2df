"""Seeing what runs: metrics, timelines, structured logs and the readiness canary.

The rooms that are observed do not know this one: ports, meshes and the path are wrapped
(`observer.py`) by whoever assembles a process, and a process that observes nothing wraps nothing.
Reaches neither JAX nor gRPC."""
