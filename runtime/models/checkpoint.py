"""A model whose weights stay in their files: each is read when it is asked for, in any type.

For checkpoints of plain safetensors whose tensors are the model's own, name by name. The model has
its sizes and its tables of angles; its parameters are on the meta device until they are filled.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from kvcap.runtime.models.gguf import header, is_gguf, name_in_file, names_in_file
from kvcap.runtime.models.quantised import quantisation
from kvcap.runtime.models.weights import folder_of, locations, on_meta, read_headers
from kvcap.runtime.models.wrappers import text_name
from kvcap.runtime.types import ATTENTION

AT_ONCE = 1 << 20  # numbers that are computed from a file's blocks at once


class Checkpoint(Mapping[str, Tensor]):
    """The weights of a model by their names in it, converted to a type as they are read.

    Args:
        places: the file of every weight, and the name that it has there.
        dtype: that weights of floating point become.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str]], dtype: torch.dtype) -> None:
        self.places, self.dtype = places, dtype

    @classmethod
    def of(cls, where: str, model: Any, dtype: torch.dtype, within: str = "") -> Checkpoint | None:
        """Return the weights in the safetensors of a directory or a finished download.

        Args:
            where: the directory or repository.
            model: made from its config.
            dtype: that weights of floating point become.
            within: put before the model's names, as a module that it is part of has them.

        Returns:
            None where transformers must load them: they are in another format, quantised, not here
            yet, or not the model's own tensor by tensor.

        Raises:
            ModelFilesBroken: files are missing or no safetensors, or the weights are pickles.
        """
        wide = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        if dtype != torch.float32 and any(getattr(model, name, None) for name in wide):
            return None
        if is_gguf(where) or quantisation(model.config) is not None:
            return None
        folder = folder_of(where)
        headers = None if folder is None else read_headers(str(folder))
        if folder is None or headers is None:
            return None
        files, stored = locations(folder), {text_name(name): name for name in headers}
        prefix = f"{model.base_model_prefix}."

        def names(name: str) -> list[str]:
            return [stored[n] for n in (name, name.removeprefix(prefix)) if n in stored]

        found = _stored(model, names, {name: x.shape for name, x in headers.items()})
        if found is None:
            return None
        return cls({within + name: (files[there], there) for name, there in found.items()}, dtype)

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self.places[name]
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(stored)
        return found.to(self.dtype) if found.is_floating_point() else found

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of a weight in the type that the file has; no others are read."""
        path, stored = self.places[name]
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_slice(stored)[start:stop]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class GgufCheckpoint(Checkpoint):
    """The weights of a GGUF file, whose rows are read as numbers or as the file's blocks."""

    def __init__(
        self, places: Mapping[str, tuple[Path, str]], dtype: torch.dtype, processor: Any
    ) -> None:
        super().__init__(places, dtype)
        self.processor = processor  # what transformers changes about a tensor
        self._last: tuple[str, Any, Any] | None = None

    @classmethod
    def of(
        cls, where: str, model: Any, dtype: torch.dtype, within: str = ""
    ) -> GgufCheckpoint | None:
        """Return the weights of a file; None where transformers must load them."""
        architecture = model.config.gguf_blocks["architecture"]
        processor = row_processor(architecture, model.config)
        if processor is None:
            return None
        tensors, layers = header(where).tensors, model.config.num_hidden_layers

        def names(name: str) -> list[str]:
            there = name_in_file(architecture, layers, name)
            return [there] if there in tensors else []

        found = _stored(model, names, {k: tuple(reversed(x.shape)) for k, x in tensors.items()})
        if found is None:
            return None
        places = {within + name: (Path(where), there) for name, there in found.items()}
        return cls(places, dtype, processor)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, None).to(self.dtype)

    def rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """Return some rows of a weight as numbers, in float32."""
        kind, data = self._tensor(name)
        package: Any = importlib.import_module("gguf")
        path, stored = self.places[name]
        if data.ndim == 1:
            numbers = package.dequantize(data[start:stop], kind)
            whole = np.array(self.processor.process(weights=numbers, name=stored).weights)
            found = torch.from_numpy(whole.astype(np.float32))
        else:  # in pieces, as what computes them takes four times their memory
            rows, shape = data[start:stop], self.shape(name)
            found = torch.empty(len(rows), *shape[1:])
            step = max(1, AT_ONCE // prod(shape[1:]))
            for at in range(0, len(rows), step):
                numbers = package.dequantize(rows[at : at + step], kind)
                found[at : at + step] = torch.from_numpy(np.ascontiguousarray(numbers))
        header(path).release()
        return found

    def kind(self, name: str) -> str:
        """Return the type that a weight has in the file, such as 'Q8_0'."""
        path, stored = self.places[name]
        return str(header(path).tensors[stored].tensor_type.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        path, stored = self.places[name]
        return tuple(reversed(header(path).tensors[stored].shape))

    def blocks(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of a weight as the bytes of the file."""
        found = torch.from_numpy(self._tensor(name)[1][start:stop].copy())
        header(self.places[name][0]).release()
        return found

    def _tensor(self, name: str) -> tuple[Any, Any]:
        """Return the type of a tensor and its rows, in the order in which the model has them."""
        if self._last is None or self._last[0] != name:
            path, stored = self.places[name]
            tensor = header(path).tensors[stored]
            rows = tensor.data
            if rows.ndim > 1:
                rows = self.processor.process(weights=rows, name=stored).weights
            self._last = name, tensor.tensor_type, rows
        return self._last[1:]


ROW_BY_ROW = (
    "TensorProcessor",
    "LlamaTensorProcessor",
    "Gemma2TensorProcessor",
    "NemotronTensorProcessor",
)
"""Lists what transformers does to tensors by which a matrix keeps its rows, in any order."""


def row_processor(architecture: str, config: Any) -> Any:
    """Return what transformers changes about a family's tensors; None where it changes rows."""
    try:
        old: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        kind = old.TENSOR_PROCESSORS.get(architecture, old.TensorProcessor)
    except (ImportError, AttributeError):
        return None
    if _conversions(architecture, config):
        return None
    heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    return kind(config=heads) if kind.__name__ in ROW_BY_ROW else None


def _conversions(architecture: str, config: Any) -> list[Any]:
    """Return how transformers renames and joins a family's tensors, if it has a list of that."""
    try:
        new: Any = importlib.import_module("transformers.integrations.gguf.gguf_conversion_mapping")
        steps: list[Any] = new.GGUF_ARCHS[architecture](config)
    except (ImportError, AttributeError, KeyError):  # most families are loaded another way
        return []
    return sorted(steps, key=lambda step: hasattr(step, "operations"))  # renamings come first


BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Holds the settings of a config that give a layer biases, which no field of a GGUF file has."""
NEEDLESS = {
    r"rope_(freqs|factors_long|factors_short)\.weight": "RoPE's factors: the config has them, or "
    "the file is refused",
    r"mtp\..*": "by transformers' name a block that guesses further tokens; no logit depends on it",
}
"""Holds the tensors of GGUF files without which a model is the same, and why."""


def add_biases(where: str, config: Any) -> None:
    """Have a config give layers the biases that a GGUF file has for all of them."""
    tensors = header(where).tensors
    for setting, parts in BIASES.items():
        if hasattr(config, setting):
            setattr(config, setting, all(f"blk.0.{part}.bias" in tensors for part in parts))


def unused_tensors(where: str, config: Any) -> list[str]:
    """Return the tensors of a GGUF file that its model has no place for; N stands for any layer."""
    found = header(where)
    model = on_meta(copy.deepcopy(config), torch.float32)  # transformers writes its type there
    architecture, own = found.value("general.architecture"), model.state_dict()
    steps = _conversions(architecture, config)
    if steps:
        places = {name: _converted(name, steps) for name in found.tensors}
    else:
        own = names_in_file(architecture, config.num_hidden_layers, own)
        places = {name: name for name in found.tensors}
    left = (
        name
        for name, place in places.items()
        if place not in own and not any(re.fullmatch(known, place) for known in NEEDLESS)
    )
    return sorted({re.sub(r"^blk\.\d+\.", "blk.N.", name) for name in left})


def _converted(name: str, steps: list[Any]) -> str:
    """Return a parameter's name by its name in a GGUF file."""
    for step in steps:
        name, _ = step.rename_source_key(name)
    return name


def _stored(
    model: Any, names: Callable[[str], list[str]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str] | None:
    """Return the name in a file of each of the model's tensors; None if one is not there.

    Args:
        model: without weights.
        names: those that a file may have for one of the model's.
        shapes: of the file's tensors.
    """
    known: dict[Tensor, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        known[tensor].append(name)
    found = dict[str, str]()
    for tensor, own in known.items():  # a file may have another of a tied weight's names
        there = [stored for name in own for stored in names(name)]
        if not there or shapes[there[0]] != tuple(tensor.shape):
            return None
        found |= dict.fromkeys(own, there[0])
    return found


def empty_model(where: str, config: Any, dtype: torch.dtype) -> Any:
    """Return the model that a config describes, with its buffers and settings, without weights."""
    with _weightless():
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, trust_remote_code=False, dtype=dtype
        )
    if is_gguf(where):
        model.generation_config = GenerationConfig.from_model_config(config)
        return model
    with contextlib.suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(where)
    return model


Filled = list[tuple[nn.Module, str, nn.Parameter]]  # module, parameter's name, what was there


def fill(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    prefix: str = "",
    without: Iterable[nn.Module] = (),
) -> Filled:
    """Give parameters that are on the meta device their weights, in their own types.

    Args:
        module: whose parameters, and those of its parts, are filled.
        weights: by the name of the parameter behind `prefix`.
        prefix: the module's own name.
        without: parts that are left as they are.

    Returns:
        What `empty` takes away again.
    """
    filled, known = Filled(), dict[int, nn.Parameter]()  # tied ones stay one
    left = {id(part) for whole in without for part in whole.modules()}
    for path, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None or not parameter.is_meta or id(part) in left:
                continue
            if id(parameter) not in known:
                weight = weights[".".join(filter(None, (prefix, path, name)))]
                known[id(parameter)] = nn.Parameter(weight.to(parameter.dtype), False)
            part._parameters[name] = known[id(parameter)]
            filled.append((part, name, parameter))
    return filled


def fill_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give buffers that a checkpoint has, such as what balances experts, their values there."""
    for name, buffer in model.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])


def empty(filled: Filled) -> None:
    """Take weights away that `fill` gave."""
    for part, name, parameter in filled:
        part._parameters[name] = parameter


@contextmanager
def streaming(
    model: nn.Module, layers: nn.ModuleList, weights: Mapping[str, Tensor]
) -> Iterator[None]:
    """Let a model run without weights: a layer has its own while it runs, all else throughout."""
    names = {id(module): name for name, module in model.named_modules()}
    held, given = fill(model, weights, without=layers), dict[int, Filled]()

    def before(layer: nn.Module, _: Any) -> None:
        given[id(layer)] = fill(layer, weights, names[id(layer)])

    def after(layer: nn.Module, _: Any, __: Any) -> None:
        empty(given.pop(id(layer), []))

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        empty(held)


@contextmanager
def _weightless() -> Iterator[None]:
    """Return modules that are made have their parameters on the meta device, and real buffers."""
    register = nn.Module.register_parameter

    def without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_data  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
