"""The commands: each module turns flags into a configuration and runs it.

Imports of a command take seconds. This package is imported first, so that Ctrl-C during them ends
the process at once without a traceback (`python -m launch.NAME`; argv is ["-m"] until then).

GRPC_VERBOSITY is read once, when gRPC is imported. It is set here, so that gRPC does not log every
failed handshake of an unknown client."""

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if sys.argv[:1] == ["-m"]:
    from jdisagg.node.signals import end_at_once

    end_at_once()
