"""Model families, with one file per family, built from `jdisagg.ops`. Also reads checkpoints and
tokenizers. `catalog.py` lists the families."""
