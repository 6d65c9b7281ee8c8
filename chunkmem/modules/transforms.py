"""What `torch.func` does to parameters: which of its transforms are refused, and how they are told."""

from __future__ import annotations

import torch

from chunkmem.data.errors import StateError

_functorch = torch._C._functorch
_REFUSED = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
_ADVICE = (
    "give it ordinary tensors instead: weights = {name: param.detach().clone() for name, param in "
    "model.named_parameters()}, and torch.func.functional_call(model, weights, inputs) inside of it"
)


def check_transforms(name: str) -> None:
    """Raise if a parameter is read where its gradient would pass autograd's graph by.

    `vmap` alone wraps nothing that requires grad of its own, and is not refused.

    Raises:
        StateError: `torch.func.grad`, `vjp`, `jvp`, `jacrev`, `jacfwd` or `hessian` runs.
    """
    stack = _functorch.get_interpreter_stack()
    if stack and any(level.key() in _REFUSED for level in stack):
        raise StateError(
            f"parameter {name} is read inside of a transform of torch.func (grad, vjp, jvp, jacrev, jacfwd, hessian), "
            f"which cannot follow memory that comes and goes; {_ADVICE}. For derivatives by the inputs, "
            "torch.autograd.grad and torch.autograd.functional.jacobian work as they are"
        )


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the transforms that run now have wrapped."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def wrapped_error(name: str) -> StateError:
    """Return the error for a managed parameter that a transform of `torch.func` was given itself."""
    return StateError(f"parameter {name} itself was given to a transform of torch.func; {_ADVICE}")
