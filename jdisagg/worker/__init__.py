"""Prefill and decode workers. They issue the scheduler's commands to a mesh, report the results to
callers, and transfer KV. Uses asyncio, and neither JAX nor gRPC."""
