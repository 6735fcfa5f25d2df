"""Starts, monitors, restarts and stops child processes on one host. No child outlives its parent.
The code is independent of the programs that the children run."""
