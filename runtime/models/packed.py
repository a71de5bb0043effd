"""Matrices of a model in 8 or 4 bits, multiplied on a CPU by PyTorch's own packed products.

A few tokens are multiplied by the packed numbers as they are: what is read is what decides the time
of a token. Many are rounded to 8 bits, each token by a scale of its own, and multiplied as integers
(`torch._int_mm`), 4 bits being spread to 8 a piece at a time. Modules, and their place in a model;
knows no files.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from kvcap.runtime.errors import UnsupportedModel, first_line
from kvcap.runtime.models.blocks import BLOCKS
from kvcap.runtime.models.gguf import name_in_file
from kvcap.runtime.models.quantised import is_plain, quantisation

PackedDtype = Literal["int8", "int4", "gguf"]
PACKED = ("int8", "int4")  # to which a user has weights rounded
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
        q = _nibbles(self.numbers, ids)
        scale, zero = self.scale[:, ids].movedim(0, -2).unsqueeze(-2).unbind(-1)  # [..., g, 1]
        found = (q.to(torch.int8) - 8).unflatten(-1, (-1, GROUP))
        return torch.addcmul(zero, found.to(scale.dtype), scale).flatten(-2)[..., : self.columns]


class BlockMatrix(PackedMatrix):
    """The blocks of a GGUF file, multiplied by PyTorch's product of 4 bits.

    Its groups are the file's: numbers stay as they are, and scales are rounded to `dtype` alone.
    Numbers of 5 to 8 bits are `h · low + l`, two of 4 bits each (`BLOCKS`), so that a row is twice
    as long; tokens are given twice too. Where 16 numbers share a scale, a group has their `h` and
    their `l`, and a token's numbers stand there once times `low`.

    Args:
        kind: of its blocks.
    """

    few = 16

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, device: Any = None, kind: str = "Q8_0"
    ) -> None:
        self.kind = BLOCKS[kind]
        super().__init__(rows, columns, dtype, device)

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        wide = self.columns * (1 if self.kind.low == 1 else 2)
        held = self.rows + -self.rows % TILE
        self.numbers = _parameter((held, wide // 2), torch.uint8, device)
        self.scale = _parameter((wide // GROUP, held, 2), dtype, device)  # and the zero

    @torch.no_grad()
    def fill(self, rows: Rows) -> None:
        """Pack all rows [n, bytes] of the file, piece by piece."""
        low, dtype = self.kind.low, self.scale.dtype
        for start, stop in self.pieces(ROUNDED):
            q, scale, zero = self.kind.digits(rows(start, stop))
            scale = scale.to(dtype).float()
            if low > 1:
                q = q.unflatten(-1, (-1, 1, self.kind.size))
                high, rest = q >> (low.bit_length() - 1), q & (low - 1)
                if self.kind.size == GROUP:
                    rest = rest - 8
                    zero = torch.stack((zero, 8 * scale), -1).flatten(1)
                    scale = torch.stack((low * scale, scale), -1).flatten(1)
                q = torch.cat((high, rest), -2).flatten(1)
            more, part = -len(q) % TILE, slice(start, stop)
            both = torch.stack((scale, zero), -1).transpose(0, 1)
            self.scale[:, part] = both
            self.scale[:, stop : stop + more] = 0
            self.numbers[start : stop + more] = _pack(functional.pad(q + 8, (0, 0, 0, more)))

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        if self.kind.low > 1:
            x = x.unflatten(-1, (-1, 1, self.kind.size))
            high = x if self.kind.size == GROUP else x * self.kind.low
            x = torch.cat((high, x), -2).flatten(1)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        found: Tensor = product(x, self.numbers, GROUP, self.scale)
        return found[:, : self.rows]

    def _product_of_many(self, x: Tensor) -> Tensor:
        out, order = x.new_empty(len(x), self.rows), row_order()
        for start, stop in self.pieces(SPREAD):
            found = x @ self._columns(start, stop)  # [blocks, T, rows of a block]
            if not order.is_sorted:
                found = found[..., order.places]
            out[:, start:stop] = found.transpose(0, 1).flatten(1)[:, : stop - start]
        return out

    def _columns(self, start: int, stop: int) -> Tensor:
        """Return weights of some rows as columns [blocks, K, rows of a block], in blocks' order."""
        order, part = row_order(), slice(start, stop + -stop % TILE)
        low, size, half = self.kind.low, self.kind.size, order.size // 2
        packed = self.numbers[part].view(torch.int8)
        packed = packed.view(-1, self.columns // size, 1 if low == 1 else 2, size, half)
        q = torch.empty(*packed.shape[:2], size, 2, half, dtype=torch.int8, device=packed.device)
        for i, digits in enumerate((packed & 15, (packed >> 4) & 15)):
            if low == 1:
                q[..., i, :] = digits[:, :, 0]
            else:  # modulo 256
                torch.add(digits[:, :, 1], digits[:, :, 0], alpha=low, out=q[..., i, :])
        middle = 8 * low + 8 * (size < GROUP)  # what numbers of 4 bits have above the file's
        q -= middle if middle < 128 else middle - 256
        scale, zero = self.scale[:, part].unbind(-1)  # [groups, n]
        if low > 1 and size == GROUP:
            scale, zero = scale[1::2], zero[::2]
        both = torch.stack((scale, zero)).unflatten(-1, (-1, order.size))
        if not order.is_sorted:
            both = both[..., order.rows]
        scale, zero = both.transpose(1, 2).unflatten(-1, (1, 2, half))  # [blocks, g, 1, 2, half]
        weights = q.to(scale.dtype)
        torch.addcmul(zero, weights, scale, out=weights)
        return weights.view(len(q), self.columns, -1)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        return self._weights(_nibbles(self.numbers, ids), self.scale[:, ids])

    def _weights(self, q: Tensor, scales: Tensor) -> Tensor:
        """Return weights [..., K] of packed numbers [..., 2K], scales and zeros [2g, ..., 2]."""
        q, (scale, zero) = q.to(torch.int8) - 8, scales.movedim(0, -2).unbind(-1)
        low, size = self.kind.low, self.kind.size
        if low > 1:
            high, rest = q.unflatten(-1, (-1, 2, size)).unbind(-2)
            q = (high * low + rest).flatten(-2)
            if size == GROUP:
                q = q + 8  # what the zero of `l` adds
                scale, zero = scale[..., 1::2], zero[..., ::2]
        q = q.unflatten(-1, (-1, size)).to(scale.dtype)
        return torch.addcmul(zero[..., None], q, scale[..., None]).flatten(-2)


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


KINDS: dict[str, type[PackedMatrix]] = {
    "int8": Int8Matrix,
    "int4": Int4Matrix,
    "gguf": BlockMatrix,
}


def pack(model: nn.Module, kind: PackedDtype, rows_of: Callable[[str], Rows] | None = None) -> None:
    """Put packed matrices in the place of a model's linear layers and embeddings.

    Those that share a weight share its matrix; a weight is let go of as soon as it is rounded.
    Experts whose matrices are one tensor, and the modules of `APART`, stay as they are.

    Args:
        model: on a CPU, or without data: then its matrices are made, and not filled.
        kind: int8 or int4; gguf for the blocks of the GGUF file that the model's config is of,
            where what is in no such blocks stays as it is.
        rows_of: by a weight's name, what reads its rows, for a model on the meta device whose
            weights stay in files.
    """
    kept, uses = set[nn.Parameter](), Counter[nn.Parameter]()
    for path, module in model.named_modules():
        packable = _is_packable(path.rpartition(".")[2], module)
        (uses if packable else kept).update(module.parameters(recurse=False))
    tied: dict[nn.Parameter, PackedMatrix | None]
    tied = {weight: None for weight, count in uses.items() if count > 1}
    names: dict[int, list[str]] = defaultdict(list)  # by a weight's id, so as not to hold it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    del uses
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            weight: Any = getattr(module, "weight", None)
            if not _is_packable(name, module) or weight in kept:
                continue
            matrix = tied.get(weight)
            if matrix is None:
                device = "cpu" if rows_of is not None else weight.device
                matrix = _matrix(kind, model, names[id(weight)], weight, device)
                if matrix is None:
                    continue
                if rows_of is not None:
                    matrix.fill(rows_of(names[id(weight)][0]))
                elif not (weight.is_meta or isinstance(weight, FakeTensor)):
                    matrix.fill(_slices(weight))
            if weight in tied:
                tied[weight] = matrix
            if isinstance(module, nn.Linear):
                setattr(parent, name, PackedLinear(matrix, module.bias))
            else:
                setattr(parent, name, PackedEmbedding(matrix, _embedding_scale(module)))


def _matrix(
    kind: PackedDtype, model: Any, names: list[str], weight: Tensor, device: Any
) -> PackedMatrix | None:
    """Return an empty matrix that can hold a weight; None if its blocks are of no known type."""
    rows, columns = weight.shape
    if kind != "gguf":
        return KINDS[kind](rows, columns, weight.dtype, device)
    blocks, layers = model.config.gguf_blocks, model.config.num_hidden_layers
    stored = [name_in_file(blocks["architecture"], layers, name) for name in names]
    known = next((blocks["types"][name] for name in stored if name in blocks["types"]), None)
    return BlockMatrix(rows, columns, weight.dtype, device, known) if known in BLOCKS else None


def usual_packing(
    config: Any, dtype: torch.dtype, device: Any, observes: Collection[str]
) -> PackedDtype | None:
    """Return how weights are packed where nobody says it: those of a GGUF file stay in their bits.

    Args:
        config: from `load_config`.
        dtype: of the run; PyTorch's products of other types than bfloat16 are slow.
        device: of the run; the products are a CPU's.
        observes: what the policy looks at; some need weights as numbers.
    """
    types = getattr(config, "gguf_blocks", {}).get("types", {}).values()
    if not any(kind in BLOCKS for kind in types) or "output_projection" in observes:
        return None
    if dtype != torch.bfloat16 or torch.device(device).type != "cpu":
        return None
    return "gguf" if _fault("gguf", dtype) is None else None


def check_packing(config: Any, dtype: torch.dtype, device: Any, kind: PackedDtype) -> None:
    """Refuse packed weights where they cannot be, or would be multiplied wrongly.

    Raises:
        ValueError: no such kind, or a device that is not the CPU.
        UnsupportedModel: the checkpoint is quantised already, or this PyTorch has no such products.
    """
    if kind not in KINDS:
        raise ValueError(f"weights={kind!r}: PyTorch runs weights of {' or '.join(PACKED)}")
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"weights of {kind} are multiplied on a CPU, and this is {device}; use --device cpu, "
            "or leave --weights out"
        )
    if kind == "gguf" and not hasattr(config, "gguf_blocks"):
        raise UnsupportedModel(
            "weights='gguf' keeps the bits of a GGUF file, and the model is none, or of a family "
            "whose weights are unpacked; leave weights out, or give int8 or int4"
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
    rows = weight
    if kind == "gguf":  # the first numbers of blocks of Q8_0 are their scales
        rows = torch.randint(0, 256, (len(weight), 2, 34), generator=generator, dtype=torch.uint8)
        rows[..., :2] = (
            torch.rand(rows.shape[:2], generator=generator).half()[..., None].view(torch.uint8)
        )
        rows = rows.flatten(1)
    try:
        matrix = KINDS[kind](len(weight), 2 * GROUP, dtype)
        matrix.fill(lambda start, stop: rows[start:stop])
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


def _nibbles(numbers: Tensor, ids: Tensor) -> Tensor:
    """Return the numbers [..., K] of some rows of what is packed [N, K / 2]."""
    order = row_order()
    size, place = order.size, order.places[ids % order.size]
    blocks = numbers.view(-1, 2 * numbers.shape[1], size // 2)
    q = blocks[ids // size, :, place % (size // 2)]  # both halves
    return torch.where(place[..., None] < size // 2, q & 15, q >> 4)


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
