"""The commands. Each module reads its flags, builds a configuration and runs it.

A command's imports take seconds. This package is imported before them and makes Ctrl-C end the
process at once without a traceback. (With `python -m launch.NAME`, argv is ["-m"] during the
imports.)

gRPC reads GRPC_VERBOSITY once, at its import. This package sets it, so that gRPC does not log every
failed handshake of an unknown client."""

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if sys.argv[:1] == ["-m"]:
    from jdisagg.node.signals import end_at_once

    end_at_once()
