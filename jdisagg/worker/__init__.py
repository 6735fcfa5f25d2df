"""Prefill and decode workers: they run the scheduler's commands on a mesh, report the results to
callers, and transfer KV. Uses asyncio, and neither JAX nor gRPC."""
