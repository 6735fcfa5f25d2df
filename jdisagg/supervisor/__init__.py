"""Starts, watches, restarts and stops child processes on one host. No child outlives its parent.
Independent of the programs that run."""
