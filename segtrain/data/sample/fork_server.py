"""What the fork server of the loader workers imports before it starts them; for nothing else.

A worker that is stopped keeps the server alive, so the kernel has to end it with its rank.
"""

import signal

from segtrain.data.sample import loader  # noqa: F401  # else each worker imports torch by itself
from segtrain.distributed.signals import die_with_parent

die_with_parent(signal.SIGKILL)
