"""Contains the embedded cluster, which serves requests within one process, and the research API.
May import every package of jdisagg except `jdisagg.service`."""
