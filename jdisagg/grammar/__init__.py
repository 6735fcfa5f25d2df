"""Structured output: compiles grammars for a tokenizer, and tracks the state of each sequence in
its grammar. Does not use JAX."""
