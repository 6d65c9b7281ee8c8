"""The trace of a step in which fewer parameters are trained."""

from __future__ import annotations

from chunkmem.trace.frozen import without_training
from chunkmem.trace.model import Kind, Mode, Moment, Trace
from tests.helpers.traces import LAYOUT, grad, param


def test_a_module_that_is_not_entered_is_not_left_after_an_update_inside_backward() -> None:
    """The update of what follows comes while a module is in backward::

    trained   hold 1   land 1   release 1   hold 0   land 0   update 1   release 0   update 0
    frozen    hold 1   land 1   release 1                     update 1
    """
    moments = (
        Moment(Kind.HOLD, param(0), "block forward"),
        Moment(Kind.RELEASE, param(0), "block forward"),
        Moment(Kind.HOLD, param(1), "head backward"),
        Moment(Kind.CREATE, grad(1), "head.weight gradient"),
        Moment(Kind.RELEASE, param(1), "head backward"),
        Moment(Kind.HOLD, param(0), "block backward"),
        Moment(Kind.CREATE, grad(0), "block.weight gradient"),
        Moment(Kind.UPDATE, param(1), "update 1"),
        Moment(Kind.CONSUME, grad(1), "update 1"),
        Moment(Kind.RELEASE, param(0), "block backward"),
        Moment(Kind.UPDATE, param(0), "update 0"),
        Moment(Kind.CONSUME, grad(0), "update 0"),
    )
    sizes = {chunk: 4 for group in (0, 1) for chunk in (param(group), grad(group))}
    trace = Trace(Mode.TRAIN, LAYOUT, sizes, moments)
    fewer = without_training(trace, params=["block.weight"], groups=[0], emptied=())
    assert fewer.trace.moments == (*moments[:5], *moments[7:9])
