"""Role changes of workers: the elastic controller's inputs and the switch itself."""
