"""Assembly: an embedded cluster in one process, and the research face on it. May import every room
of jdisagg but the service."""
