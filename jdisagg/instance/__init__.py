"""Runs one instance (one model replica on one device mesh) in several processes.

Process 0, the leader, broadcasts commands to the other processes, its followers."""
