"""The planner and the web page's planning guide, which run the simulator."""
