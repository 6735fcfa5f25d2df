"""Re-exports `jdisagg.research`."""

from jdisagg.research import open_cluster, open_engine

__all__ = ["open_cluster", "open_engine"]
