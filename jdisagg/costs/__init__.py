"""What a step, a transfer and a model cost on given hardware, as numbers. Pure."""
