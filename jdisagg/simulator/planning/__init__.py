"""The planner, which runs the simulator on its best candidates."""
