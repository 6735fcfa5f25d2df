"""All checks that need a GPU, in parts of a few minutes: `python -m benchmarks.gpu_day`."""
