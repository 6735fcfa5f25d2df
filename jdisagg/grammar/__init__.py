"""Structured output: compiles grammars for a tokenizer, and computes which tokens the grammar of
each sequence allows next. Does not use JAX."""
