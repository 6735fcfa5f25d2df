"""The commands of `jdisagg`. The module of a command reads flags, builds a configuration and runs
it.

The imports of a command take seconds. This package is imported first. It makes Ctrl-C end the
process at once without a traceback during these imports. With `python -m launch.NAME`, argv is then
["-m"].

gRPC reads GRPC_VERBOSITY only once, when it is imported. This package sets the variable before, so
that gRPC does not log every failed handshake of an unknown client."""

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if sys.argv[:1] == ["-m"]:
    from jdisagg.node.signals import end_at_once

    end_at_once()
