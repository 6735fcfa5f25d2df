"""What made the shipped tiny models (models/tiny/): two checkpoints in Hugging Face form.

`corpus` writes the text from `stories.json`, `tokenizer` cuts it, `network` is the training form of
both families, `training` the loop, `export` the checkpoint folder; `train` runs it all. Serving
needs none of this code."""
