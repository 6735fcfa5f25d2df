"""The hands: JAX programs on one mesh, run by command."""
