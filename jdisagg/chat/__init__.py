"""What a chat is made of beyond text: tools that a model may call, its calls, its reasoning."""
