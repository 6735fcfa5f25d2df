"""Recipes: each file's `get_config()` returns a frozen `EngineConfig`; the docstring gives
hardware, command and expected figures."""
