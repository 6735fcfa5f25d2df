"""Engines that only studies simulate: other serving systems' loops, and pages reserved after the
prefill.

Subclasses of the simulator's classes; `StudyFleet` states what differs, and `cluster.simulate` runs
it. Nothing in `jdisagg` imports this package."""
