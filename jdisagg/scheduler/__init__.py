"""Decides which commands one worker runs next: admission, batching, KV transfer, cache eviction.
All modules are pure state machines; time and random numbers are arguments."""
