"""Array operations: JAX functions on local shards. They know axis names and shapes, never requests
or schedulers."""
