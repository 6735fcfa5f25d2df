"""Costs of a step, a transfer and a model on given hardware, as numbers. Pure."""
