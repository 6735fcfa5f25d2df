"""Published studies of disaggregated serving, repeated with the simulator (`__main__`)."""
