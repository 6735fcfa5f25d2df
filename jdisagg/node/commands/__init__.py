"""Implements the `jdisagg` commands that run a task and exit, such as measurements and plans."""
