"""The shipped tiny models: two checkpoints in Hugging Face form, and what made them.

`corpus` (words, plots, talk) writes the text, `tokenizer` cuts it, `network` is the training form of both families,
`training` the loop, `export` the checkpoint folder. `launch/train_tiny.py` runs it all. Serving needs none of this code.
"""
