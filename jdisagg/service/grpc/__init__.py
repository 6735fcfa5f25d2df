"""The public gRPC API: generation.proto, its stubs, and conversions to and from jdisagg's data
types."""
