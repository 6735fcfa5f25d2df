"""The processes of a deployment: a router, a worker (one process or several), a cluster of them on
one host, and all of it embedded in one process.

This package assembles the others. It knows no flag and no model family: the loader of a checkpoint
is passed in (`ModelSource`). The commands of `launch/` turn flags into what is built here."""
