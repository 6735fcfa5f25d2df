"""What processes say to each other: typed structs that are their own wire form. Reaches neither JAX
nor gRPC."""
