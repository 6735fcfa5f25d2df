"""Contains the embedded cluster, which serves requests within one process, and the research API.
This package may import every package of jdisagg except `jdisagg.service`."""
