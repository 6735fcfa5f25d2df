"""A guide that listens while a test runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jdisagg.guide.server import GuideServer


@contextmanager
def guide_server() -> Iterator[GuideServer]:
    with GuideServer(port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
