"""What a user may name as MODEL: a preset, a `config.json` of transformers, or a function of their own."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import ConfigError
from chunkmem.estimate.gpt import GPT, SIZES, shape_of
from chunkmem.estimate.model import Model


def from_config(path: Path, *, batch: int, seq: int, layers: int | None) -> Model:
    """Return the model that a `config.json` describes, trained to predict its own input; with `layers`, if given.

    Raises:
        ConfigError: transformers is not installed, or the file is not such a configuration.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(
            f'{path}: transformers is missing, which reads it; pip install "chunkmem[hf]" brings it'
        ) from None
    config, kind = _read(path, transformers)
    name = f"{kind.__name__} ({path})"
    if layers is not None:
        _set_layers(config, layers, path)
        name = f"{kind.__name__} with {layers} layers ({path})"
    vocabulary = int(getattr(config.get_text_config(), "vocab_size", 0))
    if not vocabulary:
        raise ConfigError(f"{path}: a {config.model_type} has no vocabulary; write a module:function for it")

    def loss(model: nn.Module) -> torch.Tensor:
        tokens = torch.randint(vocabulary, (batch, seq))
        found: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found

    return Model(name, lambda: kind._from_config(config), loss, tokens=batch * seq)


def _set_layers(config: Any, layers: int, path: Path) -> None:
    if not hasattr(config, "num_hidden_layers"):
        raise ConfigError(
            f"{path}: a {config.model_type} has no num_hidden_layers, so there is none that is the largest"
        )
    config.num_hidden_layers = layers
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[layer % len(types)] for layer in range(layers)]


def _read(path: Path, transformers: Any) -> tuple[Any, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f'{path} has no "model_type", so it is not a config.json of transformers')
    model_type = values.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names = values.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no language model for {model_type!r}; write a "
            "module:function for it"
        )
    return config, kind


DEFAULT_SEQ = 2048
KINDS = f"a GPT ({SIZES}), a config.json of transformers, or module:function"


def resolve_model(
    text: str, *, batch: int, seq: int | None = None, default_seq: int = DEFAULT_SEQ, layers: int | None = None
) -> Model:
    """Return the model that `text` names, with a batch of `batch` samples of `seq` positions.

    Args:
        text: ``gpt:7b``; a path that ends in ``.json``; or ``module:function``, see `_from_function`.
        batch: samples a step.
        seq: positions a sample; None is `default_seq`, or what the function takes by itself.
        default_seq: positions a sample of a preset and of a `config.json`, where `seq` is None.
        layers: of a `config.json` or a function, instead of their own.

    Raises:
        ConfigError: it names none of these; says what is allowed.
    """
    if text.startswith("gpt:"):
        return _preset(text, batch=batch, seq=seq or default_seq)
    if text.endswith(".json"):
        return from_config(Path(text), batch=batch, seq=seq or default_seq, layers=layers)
    if text == "gpt":
        raise ConfigError(f"MODEL {text!r} is a family; give a size ({SIZES}), or --largest")
    if ":" in text:
        return _from_function(text, batch=batch, seq=seq, layers=layers)
    raise ConfigError(f"MODEL {text!r} is not known; allowed: {KINDS}")


def _preset(text: str, *, batch: int, seq: int) -> Model:
    shape = shape_of(text.removeprefix("gpt:").lower())

    def loss(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(torch.randint(shape.vocab, (batch, seq)))
        return result

    return Model(text, lambda: GPT(shape, seq=seq), loss, tokens=batch * seq)


def _from_function(text: str, *, batch: int, seq: int | None, layers: int | None) -> Model:
    """Return what the user's function makes.

    It is called with those of ``batch``, ``seq`` and ``layers`` that it takes, and returns ``(model, step)``: a module,
    and either a function of the module that returns the loss, or what the module is called with to return it (a tensor,
    a tuple of positional arguments, a dict of keyword arguments). `chunkmem estimate` does that under fake tensors, so
    nothing is allocated.

    Raises:
        ConfigError: there is no such function, it returns something else, or it does not take `layers` and is given
            some.
    """
    make = imported(text, what="MODEL", allowed=KINDS)
    if not callable(make):
        raise ConfigError(f"MODEL {text!r} is a {type(make).__name__}, not a function")
    taken = {name: value for name, value in (("batch", batch), ("seq", seq), ("layers", layers)) if value is not None}
    parameters = inspect.signature(make).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = {name: value for name, value in taken.items() if takes_all or name in {p.name for p in parameters}}
    if layers is not None and "layers" not in given:
        raise ConfigError(
            f"MODEL {text!r} takes no `layers`, so there is none that is the largest; give it that parameter"
        )
    build, loss = model_and_loss(lambda: make(**given), name=text)
    return Model(text if layers is None else f"{text} with {layers} layers", build, loss, tokens=batch * (seq or 0))


def model_and_loss(
    make: Callable[[], Any], *, name: str
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]:
    """Split what a user's function makes, ``(model, step)``, into what builds the model and what gives its loss.

    The loss is that of the model that was built last. Building raises a ConfigError, which begins with `name`, if
    something else is made.
    """
    step: list[Any] = []

    def build() -> nn.Module:
        made = make()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
            raise ConfigError(
                f"{name} returned a {type(made).__name__}; return (model, step), where step(model) is the loss or step "
                "is what the model is called with to return it"
            )
        step[:] = [made[1]]
        return made[0]

    def loss(model: nn.Module) -> torch.Tensor:
        return loss_of(step[0](model) if callable(step[0]) else _call(model, step[0]))

    return build, loss


def imported(text: str, *, what: str, allowed: str) -> Any:
    """Return what ``module:name`` names, looked for in the current folder first.

    Args:
        text: the module and the name in it, which may have dots.
        what: begins messages.
        allowed: ends them.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{what} {text!r} cannot be loaded: {type(error).__name__}: {error}; allowed: {allowed}"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    return found


def _call(model: nn.Module, given: Any) -> Any:
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, (tuple, list)) else model(given)


def loss_of(result: Any) -> torch.Tensor:
    """Return the loss in what a model returned: itself, its `.loss`, or its `"loss"`."""
    if isinstance(result, dict) and "loss" in result:
        result = result["loss"]
    loss: torch.Tensor = getattr(result, "loss", result)
    return loss
