"""One instance of several processes: the leader's commands are broadcast to its followers. Covers
joining, liveness and the common end."""
