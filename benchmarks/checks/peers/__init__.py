"""Comparisons with other engines, tested without them through a driver that implements their
protocol."""
