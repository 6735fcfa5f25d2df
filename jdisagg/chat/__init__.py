"""Chats beyond text: tools that a model may call, its tool calls, and its reasoning."""
