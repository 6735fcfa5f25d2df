"""Parts of a chat that are not text: tools, tool calls and reasoning."""
