"""Serves a web page that compares unified, chunked and disaggregated serving of a workload.

    jdisagg guide --http_port=8080

The page takes a model, an accelerator, a link, request lengths, a rate and objectives. It shows
which mode to choose and why: the planner's highest rate of each mode, a simulation of the same
requests in each, the transfer of KV beside the prefill, and the roofline of both phases. The server
listens on this host's loopback only. Loads neither weights nor JAX."""

from jdisagg.guide.server import GuideServer
from launch.console import run
from launch.flags import define

flags = define("http_port", http_port=8080)


def main() -> None:
    with GuideServer(flags.http_port) as server:
        print(f"the guide is at {server.url}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    run(main, flags)
