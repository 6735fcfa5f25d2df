"""The path of a request: asyncio only, no JAX and no gRPC."""
