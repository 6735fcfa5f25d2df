"""Simulates a cluster in virtual time: the live request path on simulated meshes and transfers,
whose durations come from the cost model. Also generates workloads, reports results and plans
deployments. Imports neither JAX nor gRPC."""
