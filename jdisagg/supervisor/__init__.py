"""Child processes on one host: started, watched, restarted and stopped. None outlives its parent.
Knows nothing of what they run."""
