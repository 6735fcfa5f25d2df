"""gRPC's asyncio machinery, once begun, lasts as long as the process.

grpc.aio counts its channels and servers and ends its polling thread with the last of them. Where that last one is found by the
garbage collector, the collecting thread joins the polling thread: seen to hang for ever on a thread that was compiling a program. One
hold that is never given back keeps the count above zero.
"""

import grpc.aio

_held = False


def keep_grpc_alive() -> None:
    """Call it before the first channel or server is made, on the thread that makes it. Idempotent."""
    global _held
    if not _held:
        _held = True
        grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue] (public, but missing in the stubs)
