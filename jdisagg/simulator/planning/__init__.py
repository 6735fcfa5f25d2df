"""The planner and the web page's guide, on top of the simulator."""
