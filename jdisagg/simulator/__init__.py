"""The cluster on virtual time: workloads, cost-model executor and channel, reports, planner.
Reaches neither JAX nor gRPC."""
