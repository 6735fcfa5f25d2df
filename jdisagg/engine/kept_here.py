"""What the workers of this process keep, as the router of an embedded cluster knows it: the index
that a router of processes feeds from heartbeats (`router/known_blocks.py`), fed before each
placement. So it lags behind nothing."""

from collections.abc import Sequence

from jdisagg.messages.kept_blocks import KeptMark
from jdisagg.request import Request
from jdisagg.router.affinity import Known
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.worker.mesh_worker import MeshWorker


class KeptHere:
    """Implements `router.affinity.Affinity`. `secret`: keys the workers' names of blocks."""

    def __init__(self, workers: Sequence[MeshWorker], secret: bytes) -> None:
        self._workers = workers
        self._known = KnownBlocks(secret)
        self._marks = {worker.name: KeptMark() for worker in workers}
        for worker in workers:
            self._known.joined(worker.name, worker.kept_scheme)

    def known(self, request: Request) -> Known:
        for worker in self._workers:
            news = worker.kept_news(self._marks[worker.name])
            if news is not None:
                self._marks[worker.name] = self._known.told(news)
        return self._known.known(request)
