"""Other projects' engines, measured beside ours. Each runs in a separate process under its own
Python. Their code is not imported here, and no other part of the repository depends on them."""
