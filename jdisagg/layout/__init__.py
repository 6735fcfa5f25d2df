"""Computations on layouts, KV geometry and reshard plans, without side effects. Imports neither JAX
nor gRPC."""
