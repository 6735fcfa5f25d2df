"""The bridge: KV between meshes, behind one `Channel` seam."""
