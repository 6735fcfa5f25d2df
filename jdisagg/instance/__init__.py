"""One instance of many processes: the leader's commands broadcast to its followers, their joining,
their liveness, their shared end."""
