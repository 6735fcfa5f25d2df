"""Engines and fleets that only studies simulate: other serving systems' loops, pages reserved after
the prefill, several sites, decode workers that also prefill.

Subclasses of the simulator's classes; `StudyFleet` states what differs, and `cluster.simulate` runs
it. Nothing in `jdisagg` imports this package."""
