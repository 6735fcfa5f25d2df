"""The gRPC and HTTP APIs for clients, and gRPC calls between jdisagg processes. Never imports
JAX."""
