"""A model whose weights stay in their files: each is read when it is asked for, in any type.

For checkpoints of plain safetensors whose tensors are the model's own, name by name. The model has
its sizes and its tables of angles; its parameters are on the meta device until they are filled.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from kvcap.runtime.models.gguf import is_gguf
from kvcap.runtime.models.quantised import quantisation
from kvcap.runtime.models.weights import folder_of, locations, read_headers
from kvcap.runtime.models.wrappers import text_name
from kvcap.runtime.types import ATTENTION


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
        """The weights in the safetensors of a directory or a finished download.

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
        names: dict[Tensor, list[str]] = defaultdict(list)
        for name, tensor in model.state_dict(keep_vars=True).items():
            names[tensor].append(name)
        places = dict[str, tuple[Path, str]]()
        for tensor, known in names.items():  # a file may have another of a tied weight's names
            prefix = f"{model.base_model_prefix}."
            found = [n for name in known for n in (name, name.removeprefix(prefix)) if n in stored]
            if not found or headers[stored[found[0]]].shape != tuple(tensor.shape):
                return None
            name = stored[found[0]]
            places |= dict.fromkeys((within + n for n in known), (files[name], name))
        return cls(places, dtype)

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self.places[name]
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(stored)
        return found.to(self.dtype) if found.is_floating_point() else found

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a weight, in the type that they have in the file; no others are read."""
        path, stored = self.places[name]
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_slice(stored)[start:stop]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def empty_model(where: str, config: Any, dtype: torch.dtype) -> Any:
    """The model that a config describes, with its buffers and settings, without weights."""
    with _weightless():
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, trust_remote_code=False, dtype=dtype
        )
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
    """Modules that are made have their parameters on the meta device, and real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
