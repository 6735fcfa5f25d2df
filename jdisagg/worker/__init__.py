"""The worker loops: ask the scheduler, run a command, report the facts. asyncio only, no JAX and no
gRPC."""
