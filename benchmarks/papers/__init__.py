"""Published studies of disaggregated serving, asked again of the simulator (`__main__`)."""
