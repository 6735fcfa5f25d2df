"""Decides which commands a worker issues to its mesh next: admission, batching, KV transfer and
cache eviction. All modules are state machines without I/O. Time and random numbers are
arguments."""
