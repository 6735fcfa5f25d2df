"""The door: gRPC services and what makes ports of remote processes. Never
imports JAX."""
