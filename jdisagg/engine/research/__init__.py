"""The research API: sessions and KV cache objects on a caller's own meshes."""
