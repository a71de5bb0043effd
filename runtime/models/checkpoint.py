"""Reads a model's weights from their files one by one, when used, in any type.

For checkpoints of plain safetensors whose tensors are the model's own, name by name. The model has
its sizes and its tables of angles; its parameters are on the meta device until they are filled.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from kvcap.runtime.models.gguf import header, is_gguf, names_in_file
from kvcap.runtime.models.quantised import quantisation
from kvcap.runtime.models.weights import folder_of, locations, on_meta, read_headers
from kvcap.runtime.models.wrappers import text_name
from kvcap.runtime.types import ATTENTION


class Checkpoint(Mapping[str, Tensor]):
    """The weights of a model by their names in it, converted to a type as they are read.

    Args:
        files: the file of every weight, and the name that it has there.
        dtype: that weights of floating point become.
    """

    def __init__(self, files: Mapping[str, tuple[Path, str]], dtype: torch.dtype) -> None:
        self.files, self.dtype = files, dtype

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
        names_by_tensor: dict[Tensor, list[str]] = defaultdict(list)
        for name, tensor in model.state_dict(keep_vars=True).items():
            names_by_tensor[tensor].append(name)
        paths = dict[str, tuple[Path, str]]()
        # A file may have any one of a tied weight's names.
        for tensor, own in names_by_tensor.items():
            there = [stored[n] for x in own for n in (x, x.removeprefix(prefix)) if n in stored]
            if not there or headers[there[0]].shape != tuple(tensor.shape):
                return None
            location = files[there[0]], there[0]
            paths |= dict.fromkeys((within + name for name in own), location)
        return cls(paths, dtype)

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self.files[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of a weight in the type that the file has; no others are read."""
        path, stored = self.files[name]
        with safe_open(path, framework="pt") as file:
            rows: Tensor = file.get_slice(stored)[start:stop]
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


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
    tensors = {tensor.name for tensor in header(where).tensors}
    for setting, parts in BIASES.items():
        if hasattr(config, setting):
            setattr(config, setting, all(f"blk.0.{part}.bias" in tensors for part in parts))


def unused_tensors(where: str, config: Any) -> list[str]:
    """Return the tensors of a GGUF file that its model has no place for; N stands for any layer."""
    gguf = header(where)
    model = on_meta(copy.deepcopy(config), torch.float32)  # transformers writes its type there
    architecture, own = gguf.value("general.architecture"), model.state_dict()
    steps = _conversions(architecture, config)
    if steps:
        targets = {x.name: _converted(x.name, steps) for x in gguf.tensors}
    else:
        own = names_in_file(architecture, config.num_hidden_layers, own)
        targets = {x.name: x.name for x in gguf.tensors}
    left = (
        name
        for name, target in targets.items()
        if target not in own and not any(re.fullmatch(pattern, target) for pattern in NEEDLESS)
    )
    return sorted({re.sub(r"^blk\.\d+\.", "blk.N.", name) for name in left})


def _converted(name: str, steps: list[Any]) -> str:
    """Return a parameter's name by its name in a GGUF file."""
    for step in steps:
        name, _ = step.rename_source_key(name)
    return name


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
    filled, loaded = Filled(), dict[int, nn.Parameter]()  # tied ones stay one
    left = {id(part) for whole in without for part in whole.modules()}
    for path, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None or not parameter.is_meta or id(part) in left:
                continue
            if id(parameter) not in loaded:
                weight = weights[".".join(filter(None, (prefix, path, name)))]
                loaded[id(parameter)] = nn.Parameter(weight.to(parameter.dtype), False)
            part._parameters[name] = loaded[id(parameter)]
            filled.append((part, name, parameter))
    return filled


def fill_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill buffers that a checkpoint stores, such as the biases that balance experts."""
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
    held, filled = fill(model, weights, without=layers), dict[int, Filled]()

    def before(layer: nn.Module, _: Any) -> None:
        filled[id(layer)] = fill(layer, weights, names[id(layer)])

    def after(layer: nn.Module, _: Any, __: Any) -> None:
        empty(filled.pop(id(layer), []))

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
