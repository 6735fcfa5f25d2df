"""The shipped tiny models, two checkpoints in Hugging Face form; `tools/tiny_models` made them."""
