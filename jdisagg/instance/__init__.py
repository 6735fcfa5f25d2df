"""Runs one instance (one model replica on one device mesh) in several processes.

Process 0, the leader, broadcasts commands to the other processes, its followers. The modules
implement how processes join, how failures are detected, and how the instance stops."""
