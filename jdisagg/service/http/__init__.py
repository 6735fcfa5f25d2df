"""The HTTP API: OpenAI's endpoints, metrics, health and the web page. A `Frontend` handles the
requests."""
