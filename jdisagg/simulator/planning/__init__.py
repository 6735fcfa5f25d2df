"""The planner, and the planning guide of the web page. Both run the simulator."""
