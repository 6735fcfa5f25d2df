"""Structured output: grammars compiled for a tokenizer, and where a sequence stands in its own. No
JAX."""
