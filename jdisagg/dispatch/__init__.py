"""The request path of a router. Uses asyncio only, neither JAX nor gRPC."""
