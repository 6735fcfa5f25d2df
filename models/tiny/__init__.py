"""The shipped tiny models: two Hugging Face checkpoints, created by `tools/tiny_models`."""
