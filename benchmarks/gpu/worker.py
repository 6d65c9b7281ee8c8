"""The process of one row: ``python -m benchmarks.gpu.worker MODULE:FUNCTION ANSWER``, arguments in JSON on stdin."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import NoRoomError, NotHereError, Reason


def answer(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a function by name; return its figures, or why there are none."""
    module, _, name = function.partition(":")
    try:
        return {"figures": getattr(importlib.import_module(module), name)(**arguments)}
    except NotHereError as error:
        return _no(error, Reason.MISSING, named=False)
    except NoRoomError as error:
        return _no(error, Reason.NO_ROOM, named=False)
    except Exception as error:
        traceback.print_exc()
        return _no(error, Reason.NO_ROOM if _is_out_of_memory(error) else Reason.FAILED)


def _no(error: Exception, reason: Reason, *, named: bool = True) -> dict[str, Any]:
    first = str(error).strip().partition("\n")[0][:300]
    return {"why_not": f"{type(error).__name__}: {first}" if named else first, "reason": reason.value}


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    from chunkmem.data.errors import CapacityError

    if isinstance(error, (torch.cuda.OutOfMemoryError, CapacityError, MemoryError)):
        return True
    # The allocator of RAM, and CUDA where it allocates by itself, say it in a RuntimeError only.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("not enough memory", "can't allocate memory", "out of memory")
    )


def _volunteer() -> None:
    """Be the first that Linux kills when RAM is short, rather than the process that keeps the rows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _end_with_the_suite() -> None:
    """Wait until the suite's end of the pipe is closed, as it is when it was killed; end all that this row started."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer one question, and end without waiting for anybody's threads."""
    _volunteer()
    function, path = sys.argv[1:]
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_suite, daemon=True).start()
    found = answer(function, arguments)
    text = json.dumps(found, allow_nan=False)
    Path(path).write_text(text, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    # Process groups, pinned memory and profilers take long to be taken down in order, and some never end.
    os._exit(0)


if __name__ == "__main__":
    main()
