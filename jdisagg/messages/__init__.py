"""Messages between processes: frozen `Message` structs, which msgpack encodes directly. Imports
neither JAX nor gRPC."""
