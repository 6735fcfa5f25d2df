"""All that is to be tried on a GPU, in parts of a few minutes: `python -m benchmarks.gpu_day`."""
