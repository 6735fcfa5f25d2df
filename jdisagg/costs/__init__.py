"""Estimates how long steps and KV transfers take on given hardware, and how much memory models
need."""
