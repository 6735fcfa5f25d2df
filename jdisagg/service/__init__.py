"""Serving over the network: the gRPC and HTTP APIs for clients, and gRPC between our own processes.
Never imports JAX."""
