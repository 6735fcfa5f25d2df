"""Role changes of workers: the inputs of the elastic controller, and the role change itself."""
