"""One update on HOST of each form that there is a kernel for, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from chunkmem.data.types import UpdateForm
from chunkmem.optim.codes import SIGNED, UNSIGNED
from chunkmem.optim.kernels import Kernels
from chunkmem.optim.segments import HyperParameters, Segments

_HYPER = HyperParameters([1e-3], [0.9], [0.999], [1e-8], [0.01], [10])


def updates_by_form(kernels: Kernels, numel: int) -> Iterator[tuple[UpdateForm, int, Callable[[], object]]]:
    """Yield, for each form, its bytes of weights, gradients and states of `numel` elements, and what updates them.

    Nothing without native kernels: what is updated in plain PyTorch then is not done beside backward.
    """
    if "cpu" not in kernels.native_devices:
        return
    ones = partial(torch.ones, numel, device="cpu")
    for form in UpdateForm:
        low_dtype = torch.float32 if form is UpdateForm.FP32 else torch.bfloat16
        low, grads = ([ones(dtype=low_dtype)] for _ in range(2))
        has_master = form in (UpdateForm.MASTER, UpdateForm.CODES)
        weights = [ones(dtype=torch.float32)] if has_master else low
        rounded = low if has_master else []
        is_coded = form in (UpdateForm.CODES, UpdateForm.CODES_ALONE)
        exp_avgs, exp_avg_sqs = (
            [torch.zeros(codes.numel_of(numel), dtype=torch.uint8, device="cpu")]
            if is_coded
            else [ones(dtype=torch.float32)]
            for codes in (SIGNED, UNSIGNED)
        )
        segments = Segments(weights, grads, exp_avgs, exp_avg_sqs, rounded)
        held_nbytes = sum(each.nbytes for each in (*weights, *grads, *exp_avgs, *exp_avg_sqs, *rounded))

        update = partial(kernels.adamw_, segments, _HYPER, keys=[1] if is_coded else None)
        yield form, held_nbytes, update
