"""Teams of ranks, and caps, as in `tests/cpu`."""

from tests.cpu.conftest import caps_are_for_chunks, four, pair, three

__all__ = ["caps_are_for_chunks", "four", "pair", "three"]
