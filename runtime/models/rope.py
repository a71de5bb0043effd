"""Rotates keys to other positions, and says which models' keys can be moved exactly.

A key rotated at position p is moved to p - shift by rotating it back by `shift`; that needs only
the model's inverse frequencies, and which of a head's numbers rotate together: halves (i, i + R/2)
in most families, neighbours (2i, 2i + 1) in some. Exact where frequencies do not depend on the
length of the sequence. Knows configs and tensors, no cache.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcap.kernels.choice import ready
from kvcap.kernels.rotate import rotate_back

EXACT = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True)
class Rope:
    """A layer's rotary embedding: its type and, where moving keys is exact, its frequencies."""

    kind: str
    inv_freq: Tensor | None  # [R/2] float32, R rotated dimensions; None: cannot be moved exactly
    interleaved: bool = False  # neighbours (2i, 2i + 1) rotate together, not (i, i + R/2)
    longest: int | None = None
    """Holds the longest sequence, in tokens, that these frequencies are for; None: any."""
    obstacle: str = "its frequencies depend on the length"
    """Says why keys cannot be moved exactly, where they cannot."""

    @property
    def exact(self) -> bool:
        """Return whether a key can be moved to another position without knowing the length."""
        return self.inv_freq is not None


def has_rope(config: Any) -> bool:
    """Return whether a transformers config (4.57 or 5.x) has rotary positions."""
    return bool(getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None))


def has_m_rope(config: Any) -> bool:
    """Return whether a text model's config gives tokens of images three positions (M-RoPE)."""
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    return "mrope_section" in parameters


def rope_of(config: Any, layer_type: str = "full_attention", *, interleaved: bool = False) -> Rope:
    """Return the rotary embedding of `layer_type` layers, from a transformers config (4.57 or 5.x).

    No config says which numbers rotate together: whether they are `interleaved` depends on the
    family.
    """
    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in EXACT:
        return Rope(kind, None, interleaved)
    if kind == "default":
        part = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1))
        size = heads_of(layer_config(config, layer_type))[2]
        dims = int(size * (1 if part is None else part))
        inv_freq = parameters["rope_theta"] ** -(torch.arange(0, dims, 2).float() / dims)
    elif hasattr(config, "rope_parameters") and layer_type in config.rope_parameters:
        inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=layer_type)
    else:
        inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    if kind != "longrope" or parameters == _long_alone(parameters):
        return Rope(kind, inv_freq, interleaved)
    # These are the short factors, which hold for sequences as long as those first trained on.
    return Rope(kind, inv_freq, interleaved, _longest(config, parameters))


def with_one_rope(config: Any, reach: int | None) -> Any:
    """Return the config of a model whose keys are all rotated by the same frequencies.

    A model with longrope takes its long factors as soon as a position passes the length that it was
    first trained on, where keys that are held were rotated by the short ones. So one set is chosen
    before: the long factors, in the place of the short ones too, if a position can pass that
    length. `ShortFactors` has a loop read by the short ones until then.

    Args:
        config: of a text model; it is not changed.
        reach: positions that tokens can be read at; None: any number.
    """
    for name in ("rope_parameters", "rope_scaling"):  # the latter is 4.57's
        stated = getattr(config, name, None)
        if not isinstance(stated, dict):
            continue
        nested = {key: part for key, part in stated.items() if isinstance(part, dict)}
        parts = {key: _one_rope(config, part, reach) for key, part in nested.items()}
        parameters = stated | parts if nested else _one_rope(config, stated, reach)
        if parameters != stated:
            config = copy.deepcopy(config)
            setattr(config, name, parameters)
    return config


SHORT = "kvcap_short"  # an attribute of a model, which has its `ShortFactors`
_SHORT: ContextVar[bool] = ContextVar("short", default=False)


class ShortFactors:
    """The short factors of a model that was loaded by the long factors of its longrope alone.

    Its rotary embeddings rotate by these within `used`, and else as they did. A loop that has read
    all of a text by them reads it again by the long ones before it becomes too long, as
    transformers does.

    Args:
        model: loaded with the result of `with_one_rope`.
        config: the one that it was given.
        longest: tokens of the longest text that the short factors are for.
    """

    def __init__(self, model: Any, config: Any, longest: int) -> None:
        self.longest = longest
        for long in [module for module in model.modules() if _has_longrope(module)]:
            long.forward = partial(_rotation_by, long.forward, type(long)(config))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Rotate by the short factors, in this thread."""
        token = _SHORT.set(True)
        try:
            yield
        finally:
            _SHORT.reset(token)


def _has_longrope(module: Any) -> bool:
    """Return whether a module is a rotary embedding of longrope, for some type of layers."""
    kind = getattr(module, "rope_type", None)
    return "longrope" in (kind.values() if isinstance(kind, dict) else (kind,))


def _rotation_by(long: Any, short: Any, *args: Any, **named: Any) -> Any:
    return (short if _SHORT.get() else long)(*args, **named)


def _one_rope(config: Any, parameters: dict[str, Any], reach: int | None) -> dict[str, Any]:
    """Return the parameters for sequences of that reach."""
    if parameters.get("rope_type", parameters.get("type")) != "longrope":
        return parameters
    stays = reach is not None and reach <= _longest(config, parameters)
    return parameters if stays else _long_alone(parameters)


def _long_alone(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return longrope's parameters with the factors of long texts also for short ones."""
    long = {key: parameters.get(re.sub("^short_", "long_", key)) for key in parameters}
    return {key: value if long[key] is None else long[key] for key, value in parameters.items()}


def _longest(config: Any, parameters: dict[str, Any]) -> int:
    """Return the tokens of the longest sequence that longrope takes its short factors for."""
    trained = "original_max_position_embeddings"
    trained_length: int = parameters.get(trained) or getattr(
        config, trained, config.max_position_embeddings
    )
    return trained_length


def heads_of(config: Any) -> tuple[int, int, int]:
    """Return query heads, KV heads and the head size of a text model's config."""
    heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def layer_config(config: Any, layer: int | str) -> Any:
    """Return the config of a layer, or of a type's layers, which differs if sizes differ."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def _parameters(config: Any, layer_type: str) -> dict[str, Any]:
    """Return `rope_parameters` of 5.x (one, or one per layer type), or 4.57's separate fields."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is not None:
        return dict(parameters.get(layer_type, parameters))
    return {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}


def table_dtype(keys: torch.dtype) -> torch.dtype:
    """Return the type of cosines and sines for keys of a type.

    A bfloat16 key is rotated once: the table's error, 2⁻¹², is small next to its own, 2⁻⁹.
    """
    return torch.float16 if keys == torch.bfloat16 else torch.float32


def _on_cpu(x: Tensor) -> Tensor:
    """Return `x` on the CPU, which surely has float64; one without contents stays as it is."""
    return x if x.is_meta else x.cpu()


class Rotation:
    """Cosines and sines of every shift a cache can need, and the rotation by them.

    The table is `[span, 2, R/2]`, shared by all layers of one frequency. Angles are computed in
    float64: it is exact at any shift.

    Args:
        inv_freq: of the model, [R/2].
        span: shifts, from 0 on.
        device: of the keys.
        dtype: of the table, see `table_dtype`.
        interleaved: as in `Rope`.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        span: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        interleaved: bool = False,
    ) -> None:
        self._inv_freq, self.interleaved = _on_cpu(inv_freq.double()), interleaved
        self.table = rotations(self._inv_freq, torch.arange(span)).to(device, dtype)

    def named(self) -> dict[str, Tensor]:
        """Return the table's buffer by its name."""
        return {"table": self.table}

    def back(self, x: Tensor, shift: Tensor) -> Tensor:
        """Rotate `x` [..., n, D] back by `shift` [..., n], below the table's span; in x's dtype."""
        if x.dim() == 4 and ready(x):
            return rotate_back(x, shift, self.table, interleaved=self.interleaved)
        return self.back_plainly(x, shift)

    def back_plainly(self, x: Tensor, shift: Tensor) -> Tensor:
        """Rotate as `back` does, without a kernel."""
        rows = self.table.index_select(0, shift.flatten())  # [.. · n, 2, R/2]
        rows = rows.view(*shift.shape, *rows.shape[1:])
        return rotate(x, rows, back=True, interleaved=self.interleaved)

    def on(self, x: Tensor, by: Tensor, out: Tensor) -> None:
        """Rotate `x` [..., n, D] on by `by` [..., n] positions, below the table's span, to `out`.

        Both are in float32 and do not overlap. Takes four passes, where `rotate` takes eight.
        """
        rows = self.table.index_select(0, by.flatten()).view(*by.shape, *self.table.shape[1:])
        self._to(x, rows, out, 1)

    def moved(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate `x` [..., n, D] on by `by` [..., n] positions, however far: without the table."""
        rows = rotations(self._inv_freq, _on_cpu(by)).to(x.device)
        return rotate(x, rows, interleaved=self.interleaved)

    def _to(self, x: Tensor, rows: Tensor, out: Tensor, sign: int) -> None:
        """Rotate `x` by `rows` [..., 2, R/2], or by minus these, to `out`."""
        if self.interleaved:
            out.copy_(rotate(x, rows, back=sign < 0, interleaved=True))
        else:
            cos, sin = rows.float().unbind(-2)
            _rotate_halves(x, cos, sin, -sign, out)

    def unrotated(self, x: Tensor, start: int | Tensor) -> Tensor:
        """Return `x` [..., n, D] float32, rotated to the positions from `start` on, as it is at 0.

        The result is a copy. A `start` [] on the device must lie in the table, with all that follow
        it.
        """
        if isinstance(start, Tensor):
            rows = self.table.index_select(0, start + torch.arange(x.shape[-2], device=x.device))
        elif (stop := start + x.shape[-2]) <= len(self.table):
            rows = self.table[start:stop]
        else:
            rows = rotations(self._inv_freq, torch.arange(start, stop)).to(self.table.device)
        out = torch.empty_like(x)
        self._to(x, rows, out, -1)
        return out

    def rows(self, offsets: Sequence[int]) -> Tensor:
        """Return cosines and sines [offsets, 2, R/2] of any offsets, on the device."""
        if all(0 <= offset < len(self.table) for offset in offsets):
            if len(offsets) == 1:  # a view: nothing is copied, which a CUDA graph could not
                return self.table[offsets[0] : offsets[0] + 1]
            return self.table[torch.tensor(offsets, device=self.table.device)]
        return rotations(self._inv_freq, torch.tensor(offsets)).to(self.table.device)

    def back_by(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rotate all of `x` [B, H or K, T, D] back by `rows` [1, 2, R/2], or each head by its own.

        Rows of [B·K, 2, R/2] are of KV heads, whose query heads share them.
        """
        if len(rows) == 1:
            return rotate(x, rows[0], back=True, interleaved=self.interleaved)
        heads = x.reshape(len(rows), -1, *x.shape[2:])  # [B·K, G, T, D]
        rows = rows[:, None, None]
        return rotate(heads, rows, back=True, interleaved=self.interleaved).view(x.shape)


def moved_by(rope: Rope, x: Tensor, shift: Tensor | int) -> Tensor:
    """Return keys or queries [..., n, D] rotated on by `shift` positions [..., n], or all alike.

    A shift below 0 moves them back; however far, as no table is read. A key that a model made at p
    + s, moved by -s, equals the one that it makes at p; otherwise `rope` is not the model's.

    Raises:
        ValueError: keys of this type of RoPE cannot be moved exactly.
    """
    if rope.inv_freq is None:
        raise ValueError(f"keys cannot be moved exactly under RoPE of type {rope.kind!r}")
    rows = rotations(rope.inv_freq.double().cpu(), torch.as_tensor(shift).cpu()).to(x.device)
    return rotate(x, rows, interleaved=rope.interleaved)


def rotations(inv_freq: Tensor, shifts: Tensor) -> Tensor:
    """Return cosines and sines [..., 2, R/2] of `shifts` [...], computed in float64."""
    angles = shifts.double()[..., None] * inv_freq
    return torch.stack((angles.cos(), angles.sin()), dim=-2).float()


def rotate(x: Tensor, rows: Tensor, back: bool = False, interleaved: bool = False) -> Tensor:
    """Rotate the first R numbers of keys or queries by pairs, as transformers do.

    The one eager rotation, for the runtime and for exported graphs.

    Args:
        x: [..., D], D at least R; what is computed is rounded to its dtype once.
        rows: cosines and sines [..., 2, R/2], of a shape that broadcasts.
        back: by minus these angles.
        interleaved: neighbours (2i, 2i + 1) are pairs; else halves (i, i + R/2) are.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    cos, sin = rows.to(wide).unbind(-2)
    half, sign = cos.shape[-1], 1 if back else -1
    eager = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager and not interleaved and not x.requires_grad:
        out = torch.empty(x.shape, dtype=wide)
        _rotate_halves(x.to(wide), cos, sin, sign, out)
        return out.to(x.dtype)
    turning, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        rotated = _rotate_neighbours(turning, cos, sin, back).to(x.dtype)
    else:
        a, b = turning[..., :half], turning[..., half:]
        rotated = torch.cat(  # one expression: no half stays in memory after it
            (_add(a * cos, b, sin, sign), _add(b * cos, a, sin, -sign)), dim=-1
        ).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _add(total: Tensor, x: Tensor, y: Tensor, sign: int) -> Tensor:
    return total + x * y if sign > 0 else total - x * y


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> None:
    """Rotate halves into `out`, back if `sign` is 1, in four passes.

    A CPU takes as long to fill a temporary tensor as to compute it.
    """
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    to_a, to_b = out[..., :half], out[..., half : 2 * half]
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=sign)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=-sign)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]


def _rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of x [..., R] by angles of cosines and sines [..., R/2]."""
    if torch.compiler.is_compiling():  # ONNX has no complex numbers
        a, b, sin = x[..., 0::2], x[..., 1::2], -sin if back else sin
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    # A pair is one complex number: numbers that are not adjacent take several times as long.
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.complex(cos, -sin if back else sin)
    return torch.view_as_real(pairs * turns).flatten(-2)
