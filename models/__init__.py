"""Model families, one a file, assembled from `jdisagg.ops`; checkpoints, tokenizers and the
catalogue."""
