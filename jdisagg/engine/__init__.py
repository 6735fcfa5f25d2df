"""Assembles an embedded cluster in one process, and contains the research API. May import every
package of jdisagg except `jdisagg.service`."""
