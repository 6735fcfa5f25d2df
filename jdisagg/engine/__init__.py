"""Assembly of an embedded cluster in one process, and the research API. May import every package of
jdisagg but the service."""
