"""Implements launch commands that start no long-lived process of a cluster."""
