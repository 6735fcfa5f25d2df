"""Estimates time and memory of steps, transfers and models on given hardware. Pure."""
