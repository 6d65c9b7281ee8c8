"""Which states an optimizer class keeps of a parameter, and whether it can be stepped by chunks: found by trying."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.data.errors import ConfigError
from chunkmem.optim.class_calls import ClassCall, copied
from chunkmem.optim.entries import Entry, EntryForm, NumberForm, TensorForm, can_be_kept

NUM_STEPS: Final = 3
"""Some classes make their states in the second step only."""
ELEMENTWISE: Final = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "Adamax", "ASGD"]
)
"""Classes that update each element by its own gradient and states."""
_PER_PARAMETER: Final = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon}
"""Classes that are known to update each parameter by its own gradient and states."""
_SMALL: Final = 8
"""Elements of each dimension of a parameter that independence is tried with."""


_NOTHING: Final = EntryForm((), (), {}, {}, is_there=False)


class ClassTrial:
    """What is known of one class: it is stepped a few times on throw-away parameters, before the first real step.

    So caps, plans and estimates count its states, and saved ones can be loaded (ADR 45). A trial is made on the meta
    device, where numbers that are read of a tensor are 1, or, for a class that needs values, on the CPU.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        """Look at its signature; `arguments` are those of its constructor, in addition to parameters.

        Raises:
            ConfigError: its step has to call the model.
        """
        self.kind = kind
        self.name = kind.__name__
        self.arguments = arguments
        self.writes_gradients = False
        """Its step changes the gradient of a parameter that was tried."""
        self.following: set[str] = set()
        """Numbers in states that are on the device of the parameter."""
        self._calls: ClassCall | None = None
        self._found: dict[tuple[TensorForm, object], EntryForm] = {}
        self.defaults: Mapping[str, Any] = {}
        """Options of a parameter group, as the class makes them; there once there was a `sample`."""
        self._independent: set[int] = set()
        """Numbers of dimensions for which that is known."""
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{self.name}.step() needs a closure, which it calls as often as it likes, with all parameters at a "
                "time: chunkmem.Optimizer steps one chunk after the other; pass whole=True"
            )

    @property
    def call(self) -> ClassCall:
        """Steps the class; there once there was a `sample`."""
        assert self._calls is not None
        return self._calls

    def _make(self, params: Sequence[torch.Tensor], options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer of this class over one group of `params` with `options`."""
        with torch.enable_grad():
            return self.kind([{**copied(dict(options)), "params": list(params)}], **copied(dict(self.arguments)))

    def sample(self, form: TensorForm, options: Mapping[str, Any], *, name: str) -> torch.optim.Optimizer:
        """Return an optimizer of the class over one throw-away parameter without memory; `name` is for messages.

        Raises:
            ConfigError: the class refuses an option or the parameter.
        """
        dtype = form.dtype if form.dtype.is_floating_point else torch.float32
        param = torch.nn.Parameter(torch.zeros((), dtype=dtype, device="cpu").expand(form.shape))
        with _random_numbers_kept():
            try:
                made = self._make([param], options)
            except Exception as error:
                raise self._refused(form, name, error) from error
        self.defaults = dict(made.defaults)  # torch adds to those of an optimizer that loads a state
        self._calls = self._calls or ClassCall(made)
        return made

    def _refused(self, form: TensorForm, name: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.name} cannot update parameter {name} {form.shape} of {form.dtype}: {type(error).__name__}: {error}"
        )

    @property
    def is_elementwise(self) -> bool:
        """It may update parts of a parameter one after the other: the class is known to, or says so."""
        return self.kind in ELEMENTWISE or getattr(self.kind, "is_elementwise", False) is True

    def entry_form(self, form: TensorForm, options: Mapping[str, Any], *, name: str) -> EntryForm:
        """Return the states of a parameter; `name` is for messages.

        Raises:
            ConfigError: the class refuses it, keeps something that chunks cannot, or needs all parameters at once.
        """
        if not form.dtype.is_floating_point:
            return _NOTHING  # frozen for good, as quantised weights are
        key = (form, kinds_of(options))
        if (known := self._found.get(key)) is not None:
            return known
        with _random_numbers_kept(), torch.no_grad():
            found = self._try(form, options, name)
            self._require_independence(form, options)
        self.following |= {key for key, number in found.numbers.items() if number.follows}
        return self._found.setdefault(key, found)

    def _try(self, form: TensorForm, options: Mapping[str, Any], name: str) -> EntryForm:
        failure: Exception | None = None
        for device in ("meta", "cpu"):  # the second has values, and is one that any class knows
            try:
                with _NumbersOfMeta() if device == "meta" else nullcontext():  # type: ignore[no-untyped-call]
                    return self._step_on(form, options, device)
            except ConfigError:
                raise
            except Exception as error:
                failure = error
        assert failure is not None
        raise self._refused(form, name, failure) from failure

    def _step_on(self, form: TensorForm, options: Mapping[str, Any], device: str) -> EntryForm:
        made, leaf = (_leaf(form, device) for _ in range(2))
        optimizer = self._make([made], options)
        version = made._version
        entry: Entry | None = None
        first_keys: tuple[str, ...] = ()
        for number in range(NUM_STEPS):
            leaf.grad = torch.full_like(leaf, 0.5)
            before = leaf.grad._version
            (entry,) = ClassCall(optimizer)([leaf], [entry], options, is_trial=True)
            self.writes_gradients |= leaf.grad is None or leaf.grad._version != before
            first_keys = tuple(entry or ()) if number == 0 else first_keys
        if made._version != version:
            raise ConfigError(
                f"{self.name}.step() updates parameters that it has taken from its constructor, not those of "
                "param_groups, and chunkmem.Optimizer steps it on one chunk after the other; pass whole=True"
            )
        tensors, numbers = self._forms_of(entry or {}, leaf)
        return EntryForm(tuple(entry or ()), first_keys, tensors, numbers, is_there=entry is not None)

    def _forms_of(self, entry: Entry, leaf: torch.Tensor) -> tuple[dict[str, TensorForm], dict[str, NumberForm]]:
        tensors: dict[str, TensorForm] = {}
        numbers: dict[str, NumberForm] = {}
        for key, value in entry.items():
            if not isinstance(key, str) or not can_be_kept(value):
                raise ConfigError(
                    f"{self.name} keeps a {type(value).__name__} as state {key!r} of a parameter; "
                    f"chunkmem.Optimizer keeps ordinary tensors, numbers, strings and None{_instead_of(value)}"
                )
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                tensors[key] = TensorForm.of(value)
            elif isinstance(value, torch.Tensor):
                numbers[key] = NumberForm(value.dtype, follows=value.device == leaf.device and value.is_meta)
            else:
                numbers[key] = NumberForm(None, follows=False)
        return tensors, numbers

    def _require_independence(self, form: TensorForm, options: Mapping[str, Any]) -> None:
        """Have two small parameters updated together and one after the other: both have to give the same bits.

        Raises:
            ConfigError: they do not, or the class draws random numbers.
        """
        if self.kind in _PER_PARAMETER or len(form.shape) in self._independent:
            return
        self._independent.add(len(form.shape))
        small = _small(form)
        try:
            alone = [self._weights_of([number], small, options)[0] for number in range(2)]
            before = torch.get_rng_state()
            together = self._weights_of([0, 1], small, options)
        except ConfigError:
            raise
        except Exception:  # it takes no parameters as small as these: nothing is known of it
            return
        if not torch.equal(torch.get_rng_state(), before):
            raise ConfigError(
                f"{self.name}.step() draws random numbers, which parameters in chunks would get in another order "
                "than in plain PyTorch; pass whole=True"
            )
        if not all(map(torch.equal, alone, together)):
            raise ConfigError(
                f"{self.name} updates a parameter differently when another one is updated with it, as with a norm "
                "over all: chunkmem.Optimizer steps one chunk after the other; pass whole=True"
            )
        if self.is_elementwise and self.kind not in ELEMENTWISE:
            self._require_elementwise(small, options, alone[0])

    def _require_elementwise(self, small: TensorForm, options: Mapping[str, Any], whole: torch.Tensor) -> None:
        rows = small.shape[0] // 2 if small.shape else 0
        if rows:
            halves = [self._weights_of([0], small, options, rows=at)[0] for at in (slice(0, rows), slice(rows, None))]
            if not torch.equal(torch.cat(halves), whole):
                raise ConfigError(
                    f"{self.name}.is_elementwise says that elements are updated by themselves, and half of a "
                    f"parameter of shape {small.shape} gets other values than in the whole"
                )

    def _weights_of(
        self, numbers: Sequence[int], small: TensorForm, options: Mapping[str, Any], rows: slice = slice(None)
    ) -> list[torch.Tensor]:
        """Return what two steps make of parameters with these numbers, or of some of their rows."""
        draws = [torch.Generator().manual_seed(number) for number in numbers]

        def values(draw: torch.Generator, scale: float) -> torch.Tensor:
            drawn = torch.randn(small.shape, generator=draw, device="cpu").mul(scale).to(small.dtype)
            return drawn[rows] if small.shape else drawn

        leaves = [torch.nn.Parameter(values(draw, 1.0)) for draw in draws]
        optimizer = self._make(leaves, options)
        entries: list[Entry | None] = [None] * len(leaves)
        for _ in range(2):
            for leaf, draw in zip(leaves, draws, strict=True):
                leaf.grad = values(draw, 100.0)
            entries = ClassCall(optimizer)(leaves, entries, options)
        return [leaf.detach() for leaf in leaves]


class _NumbersOfMeta(TorchDispatchMode):
    """Numbers that are read of tensors on the meta device are 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        return func(*args, **(kwargs or {}))


def _leaf(form: TensorForm, device: str) -> torch.nn.Parameter:
    leaf = torch.nn.Parameter(form.empty(device))
    with torch.no_grad():
        leaf.fill_(0.25)
    return leaf


def _instead_of(value: object) -> str:
    """Return what to use in the place of a class with such a state."""
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return ""
    return '. For states in 8 bits take chunkmem.AdamW(..., states="8bit"), or one of the classes of bitsandbytes'


def kinds_of(options: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what states may depend on: of numbers that schedulers change, whether they are 0."""
    return tuple((key, _kind_of(value)) for key, value in options.items())


def _kind_of(value: Any) -> object:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return type(value).__name__, bool(value == 0)
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    return type(value).__name__


def _small(form: TensorForm) -> TensorForm:
    """Return a form with few elements in each dimension."""
    shape = tuple(min(size, max(1, _SMALL - at)) for at, size in enumerate(form.shape))
    return TensorForm.of(torch.empty(shape, dtype=form.dtype, device="meta"))


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leave random numbers as they are."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
