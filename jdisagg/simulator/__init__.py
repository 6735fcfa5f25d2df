"""Simulates a cluster in virtual time: workloads, executor and channel priced by the cost model,
reports, planner. Imports neither JAX nor gRPC."""
