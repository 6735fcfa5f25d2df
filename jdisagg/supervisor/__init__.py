"""Starts, watches, restarts and stops child processes on one host. No child outlives its parent.
Does not depend on the programs that the children run."""
