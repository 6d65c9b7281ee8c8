"""What tests of training in chunks are made of, this project's own and yours.

`check` trains a model in plain PyTorch and in chunks and compares every bit. `AdversarialLanes` and `ThrottledLanes`
are for `ChunkManager(make_lanes=...)`.
"""

from chunkmem.testing.checking import check
from chunkmem.testing.comparison import CheckReport, Comparison
from chunkmem.testing.difference import Difference
from chunkmem.testing.lanes import AdversarialLanes, ThrottledLanes

__all__ = [
    "AdversarialLanes",
    "CheckReport",
    "Comparison",
    "Difference",
    "ThrottledLanes",
    "check",
]
