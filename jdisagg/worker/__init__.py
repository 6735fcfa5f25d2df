"""The worker loops: they get commands from the scheduler, run them and report the results. This
package uses asyncio, and neither JAX nor gRPC."""
