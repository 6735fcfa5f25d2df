"""Makes the kernel kill this process when its parent ends, then executes another program: `python
leash.py <parent's pid> program argument...` (Linux only).

The script sets PR_SET_PDEATHSIG, which remains set after exec. It is a separate script, although
this starts one more interpreter, because Python code that runs between fork and exec might hang."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the signal was set
        sys.exit(1)
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
