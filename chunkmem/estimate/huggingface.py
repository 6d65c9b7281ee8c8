"""Models of transformers, from their `config.json` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkmem.errors import ConfigError
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
