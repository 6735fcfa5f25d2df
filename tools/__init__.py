"""Scripts that create files shipped with this repository. Nothing here is part of the product."""
