"""Puts matrices of few bits in the place of a model's own, to be multiplied on a CPU.

`formats` has the matrices. Knows modules and their place in a model; no files.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from kvcap.runtime.errors import UnsupportedModel, first_line
from kvcap.runtime.models.formats import matrix_of
from kvcap.runtime.models.packed_matrix import TILE, WIDTH, PackedMatrix, RowReader
from kvcap.runtime.models.quantised import is_plain, quantisation

UNPACKED = ("kv_b_proj", "gate", "router", "classifier", "shared_expert_gate")
"""Modules that stay as they are: what attention over latents reads, and what chooses experts."""


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`."""

    def __init__(self, matrix: PackedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.matrix, self.bias = matrix, bias
        self.in_features, self.out_features = matrix.columns, matrix.rows

    def forward(self, x: Tensor) -> Tensor:
        """Return products [..., N] of [..., K]."""
        products: Tensor = self.matrix(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            products = products + self.bias
        return products.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return its sizes."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class PackedEmbedding(nn.Module):
    """Replaces an `nn.Embedding`, also one that scales its rows."""

    embed_scale: Tensor | float | None

    def __init__(self, matrix: PackedMatrix, scale: Tensor | float | None) -> None:
        super().__init__()
        self.matrix = matrix
        if isinstance(scale, Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows [..., K] of ids [...]."""
        rows: Tensor = self.matrix.lookup(ids)
        scale = self.embed_scale
        if isinstance(scale, Tensor):
            scale = scale.to(rows.dtype)
        return rows if scale is None else rows * scale


def pack(model: nn.Module, kind: str, rows_of: Callable[[str], RowReader] | None = None) -> None:
    """Put packed matrices in the place of a model's linear layers and embeddings.

    Those that share a weight share its matrix; a weight is let go of as soon as it is rounded.
    Experts whose matrices are one tensor, and the modules of `UNPACKED`, stay as they are.

    Args:
        model: on a CPU, or without data: then its matrices are made, and not filled.
        kind: a name in `formats`.
        rows_of: by a weight's name, what reads its rows, for a model on the meta device whose
            weights stay in files.
    """
    kept, uses = set[nn.Parameter](), Counter[nn.Parameter]()
    for path, module in model.named_modules():
        packable = _is_packable(path.rpartition(".")[2], module)
        (uses if packable else kept).update(module.parameters(recurse=False))
    tied: dict[nn.Parameter, PackedMatrix | None]
    tied = {weight: None for weight, count in uses.items() if count > 1}
    del uses
    for path, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            weight: Any = getattr(module, "weight", None)
            if not _is_packable(name, module) or weight in kept:
                continue
            matrix = tied.get(weight)
            if matrix is None:
                device = "cpu" if rows_of is not None else weight.device
                rows, columns = weight.shape
                matrix = matrix_of(kind)(rows, columns, weight.dtype, device)
                if rows_of is not None:
                    matrix.fill(rows_of(".".join(filter(None, (path, name, "weight")))))
                elif not (weight.is_meta or isinstance(weight, FakeTensor)):
                    matrix.fill(_slices(weight))
            if weight in tied:
                tied[weight] = matrix
            if isinstance(module, nn.Linear):
                setattr(parent, name, PackedLinear(matrix, module.bias))
            else:
                setattr(parent, name, PackedEmbedding(matrix, _embedding_scale(module)))


def check_packing(config: Any, dtype: torch.dtype, device: Any, kind: str) -> None:
    """Refuse packed weights where they cannot be, or would be multiplied wrongly.

    Raises:
        ValueError: no such kind, or a device that is not the CPU.
        UnsupportedModel: the checkpoint is quantised already, or this PyTorch has no such products.
    """
    matrix_of(kind)
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"weights of {kind} are multiplied on a CPU, and this is {device}; use --device cpu, "
            "or leave --weights out"
        )
    if (method := quantisation(config)) is not None:
        raise UnsupportedModel(
            f"the model's weights are quantised by {method!r} already; leave --weights {kind} out, "
            "or give the model that they were made from"
        )
    if (why := _fault(kind, dtype)) is not None:
        raise UnsupportedModel(
            f"PyTorch {torch.__version__} has no products of {kind} weights and {dtype} that work "
            f"on this CPU ({why}); run them by ONNX Runtime (leave --backend torch out), use "
            "another --dtype, or leave --weights out"
        )


@functools.cache
def _fault(kind: str, dtype: torch.dtype) -> str | None:
    """Return the fault of products on this CPU as text; None if they are right.

    Extreme numbers are among those tried, as some CPUs sum pairs of products in 16 bits.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(TILE + 3, 2 * WIDTH, generator=generator)
    weight[0] = 1
    x = torch.randn(40, 2 * WIDTH, generator=generator).to(dtype)
    x[0] = 1
    try:
        matrix = matrix_of(kind)(len(weight), 2 * WIDTH, dtype)
        matrix.fill(_slices(weight))
        true = x.float() @ matrix.lookup(torch.arange(len(weight))).float().T
        for tokens in (1, len(x)):
            far = (matrix(x[:tokens]).float() - true[:tokens]).abs().max()
            if not far < 0.05 * true.abs().max():
                return "they are wrong"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return first_line(error)
    return None


def _is_packable(name: str, module: nn.Module) -> bool:
    if name in UNPACKED:
        return False
    if is_plain(module):
        return True
    return type(module) is nn.Embedding or _embedding_scale(module) is not None


def _embedding_scale(module: nn.Module) -> Tensor | float | None:
    """Return the factor by which an embedding scales its rows, as in Gemma 3; None without one."""
    if not isinstance(module, nn.Embedding) or "ScaledWordEmbedding" not in type(module).__name__:
        return None
    scale: Tensor | float | None = getattr(module, "embed_scale", None)
    return scale


def _slices(weight: Tensor) -> RowReader:
    return lambda start, stop: weight[start:stop]
