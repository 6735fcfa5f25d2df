"""Where bytes lie: pure arithmetic on layouts, KV geometry and reshard plans. Knows neither JAX nor
gRPC."""
