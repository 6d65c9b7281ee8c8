"""Values as people write and read them: sizes in bytes (``"24GiB"`` is 25769803776), and text that can be printed."""

from __future__ import annotations

import re
from fractions import Fraction

from chunkmem.data.errors import ConfigError

MAX_NBYTES = 2**63 - 1
"""Above this, sizes do not fit the signed 64-bit integers they end up in."""

_PREFIXES = "KMGTPE"
_WHOLE = re.compile(r"([0-9]{1,19})(?: ?B)?")
_SCALED = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([kKMGTPE])(i?)B")


def parse_nbytes(value: int | str) -> int:
    """Return a size in bytes.

    ``KiB MiB GiB TiB PiB EiB`` are powers of 1024, ``kB KB MB GB TB PB EB`` powers of 1000; one space may stand before
    the unit. A fraction of a byte is dropped: a cap never becomes larger than written.

    Raises:
        ConfigError: `value` is neither a non-negative integer nor such a string.
    """
    nbytes = _nbytes_in(value)
    if nbytes is None or not 0 <= nbytes <= MAX_NBYTES:
        allowed = '0 to 2**63 - 1, as an integer or a string such as "4096", "512MiB", "1.5GiB" or "200GB"'
        raise ConfigError(f"{shown(value)} is not a size in bytes; allowed: {allowed}")
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """Return a size for people, ``"512 B"`` or ``"1.50 GiB"``; `parse_nbytes` reads it back, to the decimals shown."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for prefix in _PREFIXES:
        size /= 1024
        # 1048575 B would round to "1024.00 KiB".
        if abs(round(size, 2)) < 1024 or prefix == _PREFIXES[-1]:
            break
    return f"{size:.2f} {prefix}iB"


def shown(value: object) -> str:
    """Return `value` as an error message quotes it: its repr, cut where it would drown the sentence."""
    try:
        text = repr(value)
    except ValueError:  # CPython refuses to print integers of more than 4300 digits.
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str, *, breaks: str = "\n") -> str:
    """Escape what cannot be printed, but for line `breaks`: labels, paths and messages of others may hold anything."""
    return "".join(c if c.isprintable() or c in breaks else c.encode("unicode_escape").decode() for c in text)


def _nbytes_in(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        return None
    if whole := _WHOLE.fullmatch(value):
        return int(whole[1])
    if scaled := _SCALED.fullmatch(value):
        base = 1024 if scaled[3] else 1000
        return int(Fraction(scaled[1]) * base ** (_PREFIXES.index(scaled[2].upper()) + 1))
    return None
