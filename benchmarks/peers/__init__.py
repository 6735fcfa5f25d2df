"""Other projects' engines, measured beside ours: each in a process of its own, under its own
Python. Nothing of them is imported here, and no other part of the repository needs them."""
