"""Role changes of workers: the inputs of the elastic controller, and the execution of role
changes."""
