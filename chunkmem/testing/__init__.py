"""What tests of training in chunks are made of, this project's own and yours.

`AdversarialLanes` and `ThrottledLanes` are for `ChunkManager(make_lanes=...)`.
"""

from chunkmem.testing.lanes import AdversarialLanes, ThrottledLanes

__all__ = ["AdversarialLanes", "ThrottledLanes"]
