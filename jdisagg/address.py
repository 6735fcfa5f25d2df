"""Network addresses as text: host:port, the form that gRPC and JAX accept."""


def host_port(host: str, port: int) -> str:
    """Joins host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
