"""Other engines measured beside ours, without any of them: a driver that speaks their protocol."""
