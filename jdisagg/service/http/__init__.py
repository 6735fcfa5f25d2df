"""The HTTP API: endpoints of OpenAI's and Anthropic's APIs, metrics, health and the web page. A
`Frontend` generates the answers."""
