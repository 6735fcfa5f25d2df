"""What makes the things that this repository ships. Nothing here is part of the product."""
