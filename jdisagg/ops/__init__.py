"""Array operations: JAX functions on local shards, independent of requests and schedulers."""
