"""Model families, one per file, built from `jdisagg.ops`; readers of checkpoints and tokenizers;
and the catalogue of families."""
