"""Starts, watches, restarts and stops child processes on one host. No child outlives its parent.
Knows nothing about the programs that the children run."""
