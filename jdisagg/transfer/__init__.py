"""Transfers KV between meshes, through the interface `Channel` (channel.py).

Words of this package and of `executor/`:
- block: KV of some tokens and consecutive layer groups of one sequence, as a global array [dp, C,
  K, T, H]. C counts rows: equal parts of the cached components (layout/kv_spec.py).
- offer: one dp rank's block, held for receivers under a random id until release or revocation.
- piece: `granule` KV heads of a block that one device sends to another. The granule is the largest
  number of heads that divides a shard on both sides. A receiving device numbers its pieces
  (`part`).
- leaf: an array that a piece is transferred as: one for each array of its codec, or the heads.
- posting: the leaves that a sender process has reserved for one pull, until the pull ends.
- peer: the other mesh, by name, or one of its processes (`KvEnd`).
- link number: counts the connections from one receiver process to one sender process.
- backend: an implementation that moves leaves between two processes (backend.py)."""
