"""The processes of a deployment: a router, a worker (one process or several), a cluster of them on
one host, and all of it embedded in one process.

Assembles the other rooms; knows no flag and no model: how a checkpoint is loaded is passed in
(`ModelSource`). The pages of `launch/` turn flags into what is built here."""
