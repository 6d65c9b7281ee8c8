"""What tests of training in chunks are made of, this project's own and yours.

`check` trains a model in plain PyTorch and in chunks and compares every bit. `AdversarialLanes` and `ThrottledLanes`
are for `ChunkManager(make_lanes=...)`.
"""

from chunkmem.testing.checking import check
from chunkmem.testing.difference import Difference
from chunkmem.testing.findings import Finding, Report
from chunkmem.testing.lanes import AdversarialLanes, ThrottledLanes

__all__ = ["AdversarialLanes", "Difference", "Finding", "Report", "ThrottledLanes", "check"]
