"""Creates the shipped tiny models (models/tiny/), two checkpoints in Hugging Face format.

`corpus` writes the text from `stories.json`, `tokenizer` splits it, `network` is the training form
of both families, `training` the loop, `export` the checkpoint folder, and `train` runs them all.
Serving needs none of this code."""
