"""What tests of training in chunks are made of, this project's own and yours.

`check` trains a model in plain PyTorch and in chunks and compares every bit. `AdversarialLanes` and `ThrottledLanes`
are for `ChunkManager(make_lanes=...)`. `FaultyDisk` and `ThrottledDisk` are system calls for the tier DISK.
"""

from chunkmem.testing.checking import check
from chunkmem.testing.comparison import CheckReport, Comparison
from chunkmem.testing.difference import Difference
from chunkmem.testing.disk import Fault, FaultKind, FaultyDisk, ThrottledDisk
from chunkmem.testing.lanes import AdversarialLanes, ThrottledLanes

__all__ = [
    "AdversarialLanes",
    "CheckReport",
    "Comparison",
    "Difference",
    "Fault",
    "FaultKind",
    "FaultyDisk",
    "ThrottledDisk",
    "ThrottledLanes",
    "check",
]
