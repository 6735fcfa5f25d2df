"""Builds the processes of a deployment: routers, workers (of one or several processes), a cluster
on one host, and a cluster embedded in one process.

This package assembles the other packages. It must not import flags or model families: the loader of
a checkpoint is passed in (`ModelSource`). `launch/` converts flags to configurations."""
