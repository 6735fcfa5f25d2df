"""The entry points: each a page, flags -> configuration -> run.

Imports of a page take seconds, and Ctrl-C during them ends it at once and without a traceback: this
package is imported first (`python -m launch.PAGE`; argv is ["-m"] until the page itself begins).

gRPC's own lines about every failed handshake of a stranger stay out of the log: it reads
GRPC_VERBOSITY once, when it is first imported."""

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if sys.argv[:1] == ["-m"]:
    from jdisagg.node.signals import end_at_once

    end_at_once()
