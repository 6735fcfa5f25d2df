"""What processes send each other: frozen structs (`Message`) that are their own wire form, and no
dataclasses. Reaches neither JAX nor gRPC."""
