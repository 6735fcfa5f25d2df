"""The research API: prefill, inspection, transfer and decode of KV caches, driven by the caller
step by step."""
