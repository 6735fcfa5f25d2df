"""Runs one instance (one engine on one device mesh) in several processes. Process 0, the leader,
broadcasts commands to the other processes, its followers. Covers joining, detection of failures,
and stopping."""
