"""Child processes on one host: started, watched, restarted, stopped; none outlives its parent.
Knows nothing of what they do."""
