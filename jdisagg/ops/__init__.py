"""Array operations: JAX functions that run on a device's local shards. They do not depend on
requests or schedulers."""
