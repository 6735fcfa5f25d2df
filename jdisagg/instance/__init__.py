"""Runs one instance in several processes: the leader broadcasts commands to its followers. Covers
joining, liveness and the common end."""
