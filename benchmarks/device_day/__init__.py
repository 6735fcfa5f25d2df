"""All measurements on a GPU or a TPU, in parts: `python -m benchmarks.device_day`."""
