"""The HTTP API on top of a `Frontend`: OpenAI's endpoints, metrics, health and the web page."""
