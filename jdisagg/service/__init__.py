"""The gRPC and HTTP APIs for clients, and gRPC between our own processes. Never imports JAX."""
