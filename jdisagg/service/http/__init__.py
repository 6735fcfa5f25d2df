"""The HTTP API: OpenAI's endpoints, metrics, health and the web page, over a `Frontend`."""
