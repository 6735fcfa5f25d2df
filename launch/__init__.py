"""The commands of `jdisagg`. The module of a command reads flags, builds a configuration and runs
it.

The imports of a command take seconds. This package is imported first, and makes Ctrl-C end the
process at once without a traceback. With `python -m launch.NAME`, argv is ["-m"] during these
imports.

gRPC reads GRPC_VERBOSITY once, when gRPC is imported. This package sets the variable first, so that
gRPC does not log every failed handshake of an unknown client."""

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if sys.argv[:1] == ["-m"]:
    from jdisagg.node.signals import end_at_once

    end_at_once()
