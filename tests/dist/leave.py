"""How a script of several ranks ends."""

import os
import sys


def leave() -> None:
    """End this process once its work is done, as r1.train does: threads of torch now and then abort an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
