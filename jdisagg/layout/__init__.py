"""Pure arithmetic on layouts, KV geometry and reshard plans. Imports neither JAX nor gRPC."""
