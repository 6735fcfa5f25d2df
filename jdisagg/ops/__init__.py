"""Array mathematics: JAX functions on local shards; they know axis names and shapes, never requests
or schedulers."""
