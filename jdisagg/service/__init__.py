"""The door: gRPC services and the one file that converts between our data and the wire. Never imports JAX."""
