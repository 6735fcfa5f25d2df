"""Benchmark scripts. Each answers one question, and its figures are ratios of interleaved runs in
one process. `results/` has the figures with machine, versions and commit."""
