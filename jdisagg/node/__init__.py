"""Builds the processes of a deployment: routers, workers, a cluster on one host, and a cluster
embedded in one process. A worker may consist of several processes.

This package connects the other packages. It must not import flags or model families. `launch/`
converts flags to configurations, and passes the functions that load a checkpoint
(`ModelSource`)."""
