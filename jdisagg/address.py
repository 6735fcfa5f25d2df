"""How an address is written: host:port, as gRPC, JAX and people read it."""


def host_port(host: str, port: int) -> str:
    """Brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
