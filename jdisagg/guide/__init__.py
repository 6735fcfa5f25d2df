"""The interactive guide: compares unified, chunked and disaggregated serving of a workload, by the
planner's stepped model and by simulation, and shows KV transfers and rooflines on a web page.
Imports neither JAX nor gRPC."""
