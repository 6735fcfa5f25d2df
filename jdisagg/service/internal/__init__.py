"""gRPC between our processes: calls of ports, worker registry, KV messages, span streams."""
