"""Messages between processes, as frozen `Message` structs that msgpack encodes directly. Imports
neither JAX nor gRPC."""
