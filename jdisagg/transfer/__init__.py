"""Transfers KV between meshes, through the interface `Channel` (channel.py).

Words of this package and of `executor/`:
- block: KV of some tokens and consecutive layer groups of one sequence, as a global array [dp, C,
  K, T, H]: dp ranks, rows, KV heads, tokens, head size. Rows are equal parts of the cached
  components, such as keys and values (layout/kv_spec.py).
- offer: one dp rank's part of a block. The sender holds this part under a random id until the offer
  is released or revoked.
- piece: the part of a block that one device sends to another, with `granule` KV heads. The granule
  is the largest number that divides the number of KV heads per shard on both sides. `part` is the
  index of a piece on the device that receives it.
- leaf: one of the arrays into which a piece is packed for the transfer. A piece without a codec is
  one leaf. A codec packs a piece into several leaves (packed values, scales, checksums).
- posting: the leaves that a sender process reserves for one pull and frees when the pull ends.
- peer: the other mesh, by name, or one of its processes (`KvEnd`).
- link number: number of the current connection from one receiver process to one sender process. It
  grows with each reconnection.
- backend: a way to transfer leaves between two processes, such as shared memory (backend.py)."""
