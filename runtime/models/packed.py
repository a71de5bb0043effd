"""Matrices of a model in 8 or 4 bits, multiplied on a CPU by PyTorch's own packed products.

A few tokens are multiplied by the packed numbers as they are: what is read is what decides the time
of a token. Many are rounded to 8 bits, each token by a scale of its own, and multiplied as integers
(`torch._int_mm`), 4 bits being spread to 8 a piece at a time. Modules, and their place in a model;
knows no files.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from kvcap.runtime.errors import UnsupportedModel, first_line
from kvcap.runtime.models.gguf import AS_THEY_ARE
from kvcap.runtime.models.quantised import is_plain, quantisation

PackedDtype = Literal["int8", "int4"]
PACKED: tuple[str, ...] = get_args(PackedDtype)
GROUP = 32  # numbers of a row that share a scale and a zero, of 4 bits
TILE = 64  # rows that are packed together, or a multiple of them
ROUNDED = 1 << 20  # weights that are rounded at once, each of which takes some 28 bytes meanwhile
SPREAD = 1 << 21  # and that are spread to 8 bits at once, of 3 bytes
LARGEST = 118  # of a row in 8 bits, that 4 bits are spread to: their own rounding comes on top
APART = ("kv_b_proj", "gate", "router", "classifier", "shared_expert_gate")
"""Modules that stay as they are: what attention over latents reads, and what chooses experts."""

Rows = Callable[[int, int], Tensor]  # of a matrix, from one row to another


class PackedMatrix(nn.Module):
    """A matrix [N, K] in fewer bits, empty until it is filled.

    Args:
        rows: `N`, numbers of a result.
        columns: `K`, numbers of a token.
        dtype: of tokens and results, and so of scales.
        device: where it is held.
    """

    few: ClassVar[int]  # tokens up to which packed numbers are multiplied as they are

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: Any = None) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self._make(dtype, device)

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        """Allocate all that is held."""
        raise NotImplementedError

    def fill(self, rows: Rows) -> None:
        """Round all weights, piece by piece."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the products [T, N] of tokens [T, K]."""
        if len(x) == 0:
            return x.new_empty(0, self.rows)
        x = self._padded(x.contiguous())
        return self.product_of_few(x) if len(x) <= self.few else self._product_of_many(x)

    def _padded(self, x: Tensor) -> Tensor:
        more = self.padded - self.columns
        return functional.pad(x, (0, more)) if more else x

    @property
    def padded(self) -> int:
        """Return a token's numbers with zeros behind: PyTorch's products read whole vectors."""
        return self.columns + -self.columns % GROUP

    def pieces(self, weights: int) -> Iterator[tuple[int, int]]:
        """Return where pieces of about so many weights begin and end, in rows."""
        step = max(TILE, weights // self.padded // TILE * TILE)
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        raise NotImplementedError

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows in 8 bits, times `row_scale` the weights, as columns [K, stop - start].

        Args:
            start: a multiple of `TILE`.
            stop: likewise, or the end.
        """
        raise NotImplementedError

    @property
    def row_scales(self) -> Tensor:
        """Return what an integer of each row is worth [N]."""
        raise NotImplementedError

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        raise NotImplementedError

    def _product_of_many(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float().div_(127)  # [T, 1]
        scale.masked_fill_(scale == 0, 1)
        rounded = (x / scale).round_().to(torch.int8)  # in float32, as scales are
        out, scales = x.new_empty(len(x), self.rows), self.row_scales.float()
        for start, stop in self.pieces(SPREAD):
            sums = torch._int_mm(rounded, self.integers(start, stop))  # [T, n] int32
            out[:, start:stop] = torch.mul(sums, scale).mul_(scales[start:stop])
        return out


class Int8Matrix(PackedMatrix):
    """8 bits, with a scale for each row: `w = scale · q`."""

    few = 4

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        self.numbers = _parameter((self.rows, self.padded), torch.int8, device)
        self.scale = _parameter((self.rows,), dtype, device)

    @torch.no_grad()
    def fill(self, rows: Rows) -> None:
        """Round all weights, piece by piece."""
        for start, stop in self.pieces(ROUNDED):
            part = slice(start, stop)
            weight = self._padded(rows(start, stop).float())
            scale = _scale(weight.abs().amax(-1) / 127, self.scale.dtype)
            self.scale[part] = scale
            rounded = (weight / scale.float()[:, None]).round_().clamp_(-127, 127)
            self.numbers[part] = rounded.to(torch.int8)

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        return torch._weight_int8pack_mm(x, self.numbers, self.scale)

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows as columns [K, stop - start]."""
        return self.numbers[start:stop].t()

    @property
    def row_scales(self) -> Tensor:
        """Return what an integer of each row is worth [N]."""
        return self.scale

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        return (self.numbers[ids] * self.scale[ids][..., None])[..., : self.columns]


class Int4Matrix(PackedMatrix):
    """4 bits, with a scale and a zero for every `GROUP` numbers: `w = row · m · (q - z)`.

    `m` and `z` are integers, so that `m · (q - z)` is what a row has in 8 bits (two levels of
    scales: QServe, https://arxiv.org/abs/2405.04532). PyTorch's product of few tokens reads
    `w = scale · (q - 8) + zero`. Rows are padded to `TILE`, columns to `GROUP`.
    """

    few = 16

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        held, groups = self.rows + -self.rows % TILE, self.padded // GROUP
        self.numbers = _parameter((held, self.padded // 2), torch.uint8, device)
        self.scale = _parameter((groups, held, 2), dtype, device)  # and the zero
        self.row = _parameter((held,), dtype, device)

    @torch.no_grad()
    def fill(self, rows: Rows) -> None:
        """Round all weights, piece by piece."""
        for start, stop in self.pieces(ROUNDED):
            weight = rows(start, stop).float()
            weight = functional.pad(self._padded(weight), (0, 0, 0, -len(weight) % TILE))
            part = slice(start, start + len(weight))
            row = _scale(weight.abs().amax(-1) / LARGEST, self.row.dtype)
            q, m, z = _round_groups(weight.unflatten(-1, (-1, GROUP)) / row.float()[:, None, None])
            scale = (m * row.float()[:, None]).to(row.dtype)  # [n, K / GROUP]
            self.row[part] = row
            self.scale[:, part] = torch.stack((scale, (8 - z) * scale), -1).transpose(0, 1)
            self.numbers[part] = _pack(q.flatten(-2).int())

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        found: Tensor = product(x, self.numbers, GROUP, self.scale)
        return found[:, : self.rows]

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows in 8 bits as columns [K, stop - start]."""
        order, end = row_order(), stop + -stop % TILE
        half = order.size // 2
        packed = self.numbers[start:end].view(-1, self.padded // GROUP, GROUP, half)
        m, zeros = self._multipliers(start, end)
        found = torch.empty(self.padded, end - start, dtype=torch.int8, device=packed.device)
        places = found.view(-1, GROUP, len(packed), 2, half)
        low = torch.bitwise_and(packed, 15), torch.bitwise_right_shift(packed, 4)
        for i, q in enumerate(low):  # [blocks, groups, GROUP, half]; sums may overflow on the way
            to = places[:, :, :, i].permute(2, 0, 1, 3)
            torch.addcmul(zeros[:, :, None, i], q.view(torch.int8), m[:, :, None, i], out=to)
        if not order.is_sorted:
            found = found.view(self.padded, -1, 2 * half)[..., order.places].flatten(1)
        return found[:, : stop - start]

    def _multipliers(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return `m` and `-m · z` of every group, rows as packed: [blocks, groups, 2, half]."""
        order = row_order()
        scale, zero = self.scale[:, start:end].float().unbind(-1)  # [groups, n]
        m = (scale / self.row[start:end].float()).round_()
        zeros = (zero / scale).round_().sub_(8).mul_(m)  # (8 - z) - 8 = -z
        both = torch.stack((m, zeros)).to(torch.int16).to(torch.int8)  # modulo 256
        both = both.view(2, len(scale), -1, order.size)
        if not order.is_sorted:
            both = both[..., order.rows]
        first, second = both.unflatten(-1, (2, -1)).transpose(1, 2).unbind(0)
        return first, second

    @property
    def row_scales(self) -> Tensor:
        """Return what an integer of each row is worth [N]."""
        return self.row[: self.rows]

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        order = row_order()
        size, place = order.size, order.places[ids % order.size]
        blocks = self.numbers.view(-1, self.padded, size // 2)
        q = blocks[ids // size, :, place % (size // 2)]  # [..., K] both halves
        q = torch.where(place[..., None] < size // 2, q & 15, q >> 4)
        scale, zero = self.scale[:, ids].movedim(0, -2).unsqueeze(-2).unbind(-1)  # [..., g, 1]
        found = (q.to(torch.int8) - 8).unflatten(-1, (-1, GROUP))
        return torch.addcmul(zero, found.to(scale.dtype), scale).flatten(-2)[..., : self.columns]


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`."""

    def __init__(self, matrix: PackedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.matrix, self.bias = matrix, bias
        self.in_features, self.out_features = matrix.columns, matrix.rows

    def forward(self, x: Tensor) -> Tensor:
        """Return products [..., N] of [..., K]."""
        found: Tensor = self.matrix(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            found = found + self.bias
        return found.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return its sizes."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class PackedEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding`, and of one that scales what it looks up."""

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
        found: Tensor = self.matrix.lookup(ids)
        scale = self.embed_scale
        if isinstance(scale, Tensor):
            scale = scale.to(found.dtype)
        return found if scale is None else found * scale


KINDS: dict[str, type[PackedMatrix]] = {"int8": Int8Matrix, "int4": Int4Matrix}


def pack(model: nn.Module, kind: PackedDtype, rows_of: Callable[[str], Rows] | None = None) -> None:
    """Put packed matrices in the place of a model's linear layers and embeddings.

    Those that share a weight share its matrix; a weight is let go of as soon as it is rounded.
    Experts whose matrices are one tensor, and the modules of `APART`, stay as they are.

    Args:
        model: on a CPU, or without data: then its matrices are made, and not filled.
        kind: int8 or int4.
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
                matrix = KINDS[kind](rows, columns, weight.dtype, device)
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
    if kind == "gguf":
        raise UnsupportedModel(f"no weights={kind!r}: {AS_THEY_ARE}; leave it out")
    if kind not in KINDS:
        raise ValueError(f"weights={kind!r}: PyTorch runs weights of {' or '.join(PACKED)}")
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
    """Return what is wrong with products on this CPU; None: they are right.

    Extreme numbers are among those tried, as some CPUs sum pairs of products in 16 bits.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(TILE + 3, 2 * GROUP, generator=generator)
    weight[0] = 1
    x = torch.randn(40, 2 * GROUP, generator=generator).to(dtype)
    x[0] = 1
    try:
        matrix = KINDS[kind](len(weight), 2 * GROUP, dtype)
        matrix.fill(_slices(weight))
        true = x.float() @ matrix.lookup(torch.arange(len(weight))).float().T
        for tokens in (1, len(x)):
            far = (matrix(x[:tokens]).float() - true[:tokens]).abs().max()
            if not far < 0.05 * true.abs().max():
                return "they are wrong"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return first_line(error)
    return None


class RowOrder(NamedTuple):
    """A list of how rows lie in a block: those of its bytes' low halves, then of the high ones."""

    rows: Tensor  # the row at each place
    places: Tensor  # the place of each row
    is_sorted: bool  # rows lie in their own order

    @property
    def size(self) -> int:
        """Return rows of a block."""
        return len(self.rows)


@functools.cache
def row_order() -> RowOrder:
    """Return how this build packs rows: in blocks of as many as its vectors hold, found by a trial.

    A block is, for each column, as many bytes as half its rows, each with two rows' numbers.

    Raises:
        NotImplementedError: it packs in another way.
    """
    rows, columns = torch.arange(TILE)[:, None], torch.arange(2)
    labels = (rows % 16 + 0 * columns, rows // 16 + 0 * columns, 0 * rows + columns)
    low, high, column = (_pack(label).flatten() for label in labels)
    half = int((column != 0).int().argmax())  # bytes of the first column
    parts = ((a & 15) + 16 * (b & 15) for a, b in ((low, high), (low >> 4, high >> 4)))
    found = torch.cat([part[:half] for part in parts]).long()
    if found.sort().values.tolist() != list(range(2 * half)) or half == 0 or TILE % (2 * half):
        raise NotImplementedError("it packs four bits in an order that is not known")
    places = found.argsort()
    return RowOrder(found, places, bool((found == places).all()))


def _pack(numbers: Tensor) -> Tensor:
    """Pack numbers [n, K] from 0 to 15 as PyTorch's product of few tokens reads them: [n, K/2]."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
    return packed


def _round_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups [n, g, GROUP] of at most `LARGEST` to `m · (q - z)`, `q` from 0 to 15.

    Of the two `m` about the group's range, the one with the smaller error.
    """
    least, most = weight.amin(-1).clamp_(max=0), weight.amax(-1).clamp_(min=0)
    step = (most - least) / 15  # at most 2 · LARGEST / 15, below 16
    best: tuple[Tensor, ...] = ()
    for m in (step.ceil().clamp_(min=1), step.floor().clamp_(min=1)):
        z = (-least / m).round_().clamp_(max=15)
        q = (weight / m[..., None]).round_().add_(z[..., None]).clamp_(0, 15)
        error = (q - z[..., None]).mul_(m[..., None]).sub_(weight).square_().sum(-1)
        if not best:
            best = q, m, z, error
            continue
        take = error < best[3]
        best = (
            torch.where(take[..., None], q, best[0]),
            *(torch.where(take, new, old) for new, old in zip((m, z), best[1:3], strict=True)),
        )
    return best[0], best[1], best[2]


def _scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in the type that they are held in, 1 where there is nothing to scale."""
    scale = scale.to(dtype)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _is_packable(name: str, module: nn.Module) -> bool:
    if name in APART:
        return False
    if is_plain(module):
        return True
    return type(module) is nn.Embedding or _embedding_scale(module) is not None


def _embedding_scale(module: nn.Module) -> Tensor | float | None:
    """Return what an embedding that scales multiplies its rows by, as in Gemma 3."""
    if not isinstance(module, nn.Embedding) or "ScaledWordEmbedding" not in type(module).__name__:
        return None
    scale: Tensor | float | None = getattr(module, "embed_scale", None)
    return scale


def _slices(weight: Tensor) -> Rows:
    return lambda start, stop: weight[start:stop]
