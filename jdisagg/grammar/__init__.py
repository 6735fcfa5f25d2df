"""Structured output: grammars compiled for a tokenizer, and the state of each sequence in its
grammar. No JAX."""
