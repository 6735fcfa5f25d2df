"""Parts of a chat other than the content of messages: tools, tool calls and reasoning."""
