"""A linear layer whose weight is several parameters, so that no chunk has to hold the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from chunkmem.data.errors import CheckpointError, LayoutError
from chunkmem.modules.whole import WholeParameter

_NAMES = ("weight", "bias")


class TiledLinear(nn.Module):
    """`nn.Linear` in tiles, each an `nn.Linear` of its own, which are used one after the other::

        in_splits=3, out_splits=2          input[..., 0:c]  input[..., c:2c]  input[..., 2c:]

        output[..., :r] = bias[:r] +       tile_0_0     +     tile_0_1     +     tile_0_2
        output[..., r:] = bias[r:] +       tile_1_0     +     tile_1_1     +     tile_1_2

    It draws the random numbers of the `nn.Linear` of its size, and its `state_dict` has that layer's `weight` and
    `bias`. Where sizes are no multiple of splits, the first tiles are larger by one. Partial sums over inputs are
    rounded to the dtype, so `out_splits` alone is closer to the untiled layer.
    """

    in_features: int
    out_features: int
    in_splits: int
    out_splits: int
    has_bias: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer; arguments but for the splits are those of `nn.Linear`.

        Args:
            in_features: size of an input's last dimension.
            out_features: size of an output's.
            bias: whether there is one.
            in_splits: tiles side by side, each of which reads a part of the input.
            out_splits: tiles one below the other, each of which makes a part of the output.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            LayoutError: there are not as many features as splits, or no splits.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        _check_splits(self, in_splits, out_splits)
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._fill(whole.weight, whole.bias, in_splits=in_splits, out_splits=out_splits)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's name)
        """Return `input @ weight.T + bias`; the last dimension of `input` is `in_features`."""
        parts: tuple[Tensor, ...] = (input,)
        if self.in_splits > 1:
            parts = input.split(_sizes(self.in_features, self.in_splits), dim=-1)
        rows = [self._row(row, parts) for row in range(self.out_splits)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _row(self, row: int, parts: tuple[Tensor, ...]) -> Tensor:
        """Return a part of the output, of all parts of the input."""
        total: Tensor = getattr(self, _tile(row, 0))(parts[0])
        for column in range(1, self.in_splits):
            total = total + getattr(self, _tile(row, column))(parts[column])
        return total

    @property
    def weight(self) -> Tensor:
        """The whole weight for whoever asks for its shape or dtype, or reads it: a copy that cannot be written to."""
        return self._whole("weight")

    @property
    def bias(self) -> Tensor | None:
        """The whole bias, as `weight`; None if there is none."""
        return self._whole("bias") if self.has_bias else None

    def _whole(self, name: str) -> Tensor:
        # Not looked up, which would be a read: asking for a dtype needs no chunk.
        like = getattr(self, _tile(0, 0))._parameters.get(name)
        if like is None:
            raise AttributeError(f"{name} of a TiledLinear whose tiles were replaced: look at the tiles")
        keys = [key for kind, key, _ in _places(self) if kind == name]
        shape = _shapes(self)[name]

        def join() -> Tensor:
            return self.join(name, [self.get_parameter(key) for key in keys])

        return WholeParameter(join, shape, tiles=keys, like=like, requires_grad=like.requires_grad)

    def tiles(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of tiles by the name of the whole one, row by row."""
        found: dict[str, list[nn.Parameter]] = {}
        own = dict(self.named_parameters())  # no reads
        for name, key, _ in _places(self):
            found.setdefault(name, []).append(own[key])
        return found

    def join(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return what has the shape of the whole `weight` or `bias`, given what has that of its `tiles`, row by row."""
        num = 1 if name == "bias" else self.in_splits
        rows = [parts[at] if num == 1 else torch.cat(parts[at : at + num], dim=1) for at in range(0, len(parts), num)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def split(self, name: str, whole: Tensor) -> list[Tensor]:
        """Undo `join`: copies.

        Raises:
            CheckpointError: `whole` has another shape.
        """
        if whole.shape != _shapes(self)[name]:
            raise CheckpointError(
                f"a state of shape {list(whole.shape)}, and the {name} of a tiled layer has {list(_shapes(self)[name])}"
            )
        return [_piece(whole, place) for kind, _, place in _places(self) if kind == name]

    def reset_parameters(self) -> None:
        """Draw the parameters again, as `nn.Linear` does."""
        (first, *_) = self.parameters()
        options = {"device": first.device, "dtype": first.dtype}
        whole = nn.Linear(self.in_features, self.out_features, self.has_bias, **options)
        with torch.no_grad():
            for name, key, place in _places(self):
                self.get_parameter(key).copy_(getattr(whole, name)[place])

    def extra_repr(self) -> str:
        """Return the constructor's arguments."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
        return f"{sizes}, in_splits={self.in_splits}, out_splits={self.out_splits}"

    def _fill(self, weight: Tensor, bias: Tensor | None, *, in_splits: int, out_splits: int) -> None:
        """Make the tiles of copies of a whole layer's parameters."""
        self.in_splits, self.out_splits, self.has_bias = in_splits, out_splits, bias is not None
        self._loading = "", set[str]()
        """Of a `load_state_dict` under way: the layer's prefix in it, and names that were refused."""
        whole = {"weight": weight, "bias": bias}
        # All copies before the first tile: over ranks, what is attached ends the exchange that brought the whole.
        copies = {key: _copy(whole[name], place) for name, key, place in _places(self)}
        rows, columns = _sizes(self.out_features, out_splits), _sizes(self.in_features, in_splits)
        for row, height in enumerate(rows):
            for column, width in enumerate(columns):
                name = _tile(row, column)
                tile = nn.Linear(width, height, f"{name}.bias" in copies, device="meta", dtype=weight.dtype)
                for kind in _NAMES:
                    if (param := copies.pop(f"{name}.{kind}", None)) is not None:
                        setattr(tile, kind, param)
                self.add_module(name, tile.train(self.training))
        self.register_state_dict_post_hook(_join_entries)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_split_entries)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_name_missing)  # type: ignore[no-untyped-call]


def make_tiled(linear: nn.Linear, *, in_splits: int, out_splits: int) -> None:
    """Turn an `nn.Linear` into a `TiledLinear` of the same values. It stays the same object, whoever refers to it.

    Raises:
        LayoutError: there are not as many features as splits, or no splits.
    """
    _check_splits(linear, in_splits, out_splits)
    weight, bias = linear.weight, linear.bias
    del linear.weight, linear.bias
    linear.__class__ = TiledLinear  # type: ignore[assignment]
    assert isinstance(linear, TiledLinear)
    linear._fill(weight, bias, in_splits=in_splits, out_splits=out_splits)


def _check_splits(layer: Any, in_splits: object, out_splits: object) -> None:
    for name, splits, features in (
        ("in", in_splits, layer.in_features),
        ("out", out_splits, layer.out_features),
    ):
        if not isinstance(splits, int) or isinstance(splits, bool) or not 1 <= splits <= max(1, features):
            raise LayoutError(
                f"{name}_splits is {splits!r}; it is a number of tiles, from 1 to {name}_features, which is {features}"
            )


def _sizes(features: int, splits: int) -> list[int]:
    """Return the features of each split, the larger ones first."""
    size, larger = divmod(features, splits)
    return [size + 1] * larger + [size] * (splits - larger)


def _shapes(layer: TiledLinear) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole parameters."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (layer.out_features, layer.in_features)}
    return shapes | {"bias": (layer.out_features,)} if layer.has_bias else shapes


def _tile(row: int, column: int) -> str:
    return f"tile_{row}_{column}"


def _places(layer: TiledLinear) -> Iterator[tuple[str, str, tuple[slice, ...]]]:
    """Yield the name of a whole parameter, of a tile's, as in a `state_dict`, and where in the whole that is."""
    rows, columns = (
        [slice(*ends) for ends in pairwise(accumulate(_sizes(features, splits), initial=0))]
        for features, splits in ((layer.out_features, layer.out_splits), (layer.in_features, layer.in_splits))
    )
    for row, height in enumerate(rows):
        for column, width in enumerate(columns):
            yield "weight", f"{_tile(row, column)}.weight", (height, width)
        if layer.has_bias:
            yield "bias", f"{_tile(row, 0)}.bias", (height,)


def _copy(param: Tensor | None, place: tuple[slice, ...]) -> nn.Parameter:
    assert param is not None
    piece = nn.Parameter(_piece(param.detach(), place), requires_grad=param.requires_grad)
    for key, value in vars(param).items():  # what libraries have marked it with
        vars(piece).setdefault(key, value)
    return piece


def _piece(whole: Tensor, place: tuple[slice, ...]) -> Tensor:
    return whole[place].clone(memory_format=torch.contiguous_format)


# Hooks are functions, so that a layer can be copied and pickled.


def _join_entries(layer: TiledLinear, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Put `weight` and `bias` in the place of those of tiles, unless a tile has others (it was wrapped, say)."""
    keys: dict[str, list[str]] = {}
    for name, key, _ in _places(layer):
        keys.setdefault(name, []).append(key)
    tiles = {key for key in state if key.startswith(f"{prefix}tile_")}
    if tiles != {prefix + key for found in keys.values() for key in found}:
        return
    for name, found in keys.items():
        state[prefix + name] = layer.join(name, [state.pop(prefix + key) for key in found])
    metadata = getattr(state, "_metadata", {})
    for key in [key for key in metadata if key.startswith(f"{prefix}tile_")]:
        del metadata[key]


def _split_entries(
    layer: TiledLinear,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    """Give each tile its part of `weight` and `bias`. Entries of tiles, as `named_parameters` has them, are loaded."""
    _, refused = layer._loading = prefix, set[str]()
    wholes: dict[str, Tensor] = {}
    for name, shape in _shapes(layer).items():
        if prefix + name not in state:
            continue
        whole = state.pop(prefix + name)
        if isinstance(whole, Tensor) and whole.shape == shape:
            wholes[name] = whole
        elif isinstance(whole, Tensor):
            refused.add(name)
            errors.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {whole.shape} from checkpoint, the "
                f"shape in current model is {torch.Size(shape)}."
            )
        else:
            refused.add(name)
            errors.append(f"{prefix}{name} is a {type(whole).__name__}, not a tensor")
    for name, key, place in _places(layer):
        if name in wholes:
            # What is assigned becomes the parameter, and is to have memory of its own.
            keeps = metadata.get("assign_to_params_buffers", False)
            state[prefix + key] = _piece(wholes[name], place) if keeps else wholes[name][place]


def _name_missing(layer: TiledLinear, incompatible: Any) -> None:
    """Have the layer's own names among those that were missing, once."""
    (prefix, refused), layer._loading = layer._loading, ("", set())
    names = {prefix + key: name for name, key, _ in _places(layer)}
    missing = [key for key in incompatible.missing_keys if names.get(key) not in refused]
    own = [prefix + names[key] if key in names else key for key in missing]
    incompatible.missing_keys[:] = dict.fromkeys(own)
