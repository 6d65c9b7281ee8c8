"""How long work keeps this process busy, where a test asks how its cost grows."""

import gc
import time
from collections.abc import Callable


def cpu_s(work: Callable[[], object]) -> float:
    """Seconds of CPU that `work` takes in this process.

    Not the clock, since other processes and the disk may be busy; and without Python's garbage collector, whose full
    collections walk through everything that the tests before have left in the process.
    """
    gc.collect()
    gc.disable()
    try:
        begin_s = time.process_time()
        work()
        return time.process_time() - begin_s
    finally:
        gc.enable()
