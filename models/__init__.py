"""Model families, one per file, assembled from `jdisagg.ops`, with checkpoints, tokenizers and the
catalogue."""
