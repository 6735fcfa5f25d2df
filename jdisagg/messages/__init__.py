"""Messages between processes. Each is a frozen `Message` struct, which msgpack encodes directly.
Imports neither JAX nor gRPC."""
