"""gRPC between our own processes: typed calls of ports, registry, KV control, span streams."""
