"""The router's decisions: pure functions of a snapshot that choose the workers of each request."""
