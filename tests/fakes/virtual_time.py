"""Tests run on the simulator's virtual time (jdisagg/simulator/virtual_time.py)."""

from jdisagg.simulator.virtual_time import Stuck, VirtualClock, VirtualLoop, run_virtually

__all__ = ["Stuck", "VirtualClock", "VirtualLoop", "run_virtually"]
