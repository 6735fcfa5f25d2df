"""gRPC between jdisagg processes: calls to workers and routers, worker registration, control
messages of KV transfers, token streams."""
