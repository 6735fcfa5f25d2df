"""The research API: sessions and KV cache objects on one's own meshes."""
