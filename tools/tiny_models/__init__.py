"""Creates the shipped tiny models (models/tiny/), two checkpoints in Hugging Face format.

`corpus` generates training text from `stories.json`, and `tokenizer` trains the tokenizer.
`network` implements both models for training, and `training` is the training loop. `export` writes
the checkpoint folder, and `train` is the command that runs all steps. Serving does not import this
code."""
