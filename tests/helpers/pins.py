"""Who has chunks pinned now."""

from __future__ import annotations

from chunkmem import ChunkManager


def pinned_by_calls(manager: ChunkManager) -> tuple[str, ...]:
    """Running modules, and what is held for somebody outside of them."""
    access = manager.runtime.modules.access
    frames = (str(frame) for frame in access.stack if frame.groups)
    return (*frames, *(f"held: {chunk.label}" for chunk in manager.runtime.memory.pager.held))


def pinned_by_backward(manager: ChunkManager) -> tuple[str, ...]:
    """Running backwards: calls, single nodes, regions, and what `create_graph` needs again."""
    backward, regions = manager.runtime.modules.backward, manager.runtime.modules.regions
    runs = [run for task in backward._nodes._tasks.values() for run in task.runs.values()]
    return (
        *(str(call) for calls in backward._running.values() for call in calls if call.open),
        *(f"{run.call.name} backward" for run in runs if run.pinned or run.frame is not None),
        *(manager.runtime.memory.store.chunks[key].label for key in regions._live._pinned),
        *(f"create_graph backward: {chunk.label}" for chunk in backward._held),
    )
