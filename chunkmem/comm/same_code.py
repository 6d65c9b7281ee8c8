"""All ranks run the same chunkmem: found out before they exchange anything whose form another version may not know."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from chunkmem.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_digest() -> str:
    """Return what tells this chunkmem from another one: a digest of its source files.

    It is that of the first call: the files may be replaced while a job runs.
    """
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        found.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def require_same_code(store: Store, rank: int, names: Sequence[int], *, timeout_s: float) -> None:
    """Check that all ranks run the same code; all of them call it, and use `store` for nothing else so far.

    Ranks of different versions send messages of other sizes, for which gloo aborts the process.

    Args:
        store: that they have met in.
        rank: this one, among them.
        names: what messages call each of them.
        timeout_s: how long to wait for the others.

    Raises:
        RankError: they do not; on all ranks that check it.
        RuntimeError: a rank did not come in time.
    """
    own = code_digest()
    store.set(f"code of rank {rank}", own)
    if store.compare_set("code", "", own).decode() != own:
        store.set("codes differ", "1")
    if store.add("ranks that came", 1) == len(names):
        store.set("all came", "codes differ" if store.check(["codes differ"]) else "one code")
    store.wait(["all came"], timedelta(seconds=timeout_s))
    if store.get("all came") == b"codes differ":
        ranks_of: dict[str, list[int]] = {}
        for other, name in enumerate(names):
            ranks_of.setdefault(store.get(f"code of rank {other}").decode(), []).append(name)
        found = "; ".join(
            f"{digest} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for digest, ranks in ranks_of.items()
        )
        fewest = min(ranks_of.values(), key=len)
        raise RankError(
            f"the ranks run different versions of chunkmem (digests of its source files: {found}; this rank has "
            f"{_PACKAGE}); install the same one everywhere, and start all ranks again",
            tuple(fewest),
        )
