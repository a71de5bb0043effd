"""Counts a model's weights from the headers of its safetensors files.

A header gives the type and shape of every tensor in a file. safetensors checks it when the file is
opened: its length, its JSON, and that the tensors cover the file without overlap. Here it is found
which files there are, whether they hold the tensors that the model needs, and how many bytes these
take once loaded. No tensor is read, and nothing in these files can be executed.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from huggingface_hub import (
    get_safetensors_metadata,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from kvcap.dtypes import NAMES, SAFETENSORS
from kvcap.runtime.errors import ModelFilesBroken, first_line
from kvcap.runtime.files import read_json
from kvcap.runtime.models.gguf import is_gguf
from kvcap.runtime.models.packed import pack
from kvcap.runtime.models.quantised import UNPACKED, parts, quantisation
from kvcap.runtime.models.wrappers import text_config, text_name
from kvcap.runtime.types import ATTENTION

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
COMPARED = 1 << 22  # numbers of two matrices that are compared at once
FLOATS = ("F64", *(SAFETENSORS[name] for name in NAMES))  # converted to the model's dtype
NO_PICKLES = (
    "its weights are pickles, which can run code when they are opened; give one with "
    "safetensors, or convert it once with save_pretrained"
)


class Tensor(NamedTuple):
    """The header of a tensor: its type as safetensors writes it, such as BF16, and its shape."""

    dtype: str
    shape: tuple[int, ...]


Headers = dict[str, Tensor]
WeightsSource = Literal[
    "safetensors headers",
    "config",
    "config, estimated",  # of an export that is not made
    "config, unpacked",
    "loaded model",
    "the manifest",
    "the file",
]


class Weights(NamedTuple):
    """The bytes of a model's weights once they are loaded, and how these were found."""

    nbytes: int
    source: WeightsSource


def read_headers(where: str) -> Headers | None:
    """Return the headers of all tensors in a model's safetensors files.

    Args:
        where: a directory, a GGUF file, or a repository of the hub, whose headers are taken from
            the cache or else requested alone.

    Returns:
        The headers; None where there are no files of safetensors, or the hub cannot be reached.

    Raises:
        ModelFilesBroken: files are missing or no safetensors, or the weights are pickles.
    """
    if is_gguf(where):  # its weights are unpacked, into what the config says
        return None
    folder = folder_of(where)
    return _on_the_hub(where) if folder is None else _in_folder(folder)


def folder_of(where: str) -> Path | None:
    """Return the directory of a model's files: its own, or that of a whole download."""
    if Path(where).is_dir():
        return Path(where)
    for name in (SINGLE, INDEX):
        cached = try_to_load_from_cache(where, name)
        if isinstance(cached, str):
            folder = Path(cached).parent
            if all((folder / file).is_file() for file in _files(folder)):
                return folder
    return None


def download(where: str) -> None:
    """Have the files of a repository's weights in the hub's cache, if they can be had."""
    if not is_gguf(where) and folder_of(where) is None:
        # What is wrong with it is said by who loads the model.
        with contextlib.suppress(OSError, ValueError):
            snapshot_download(where, allow_patterns=[SINGLE, INDEX, "model-*.safetensors"])


def locations(folder: Path) -> dict[str, Path]:
    """Return the safetensors file in `folder` that has each tensor, by the tensor's name.

    Raises:
        ModelFilesBroken: as `read_headers`.
    """
    return {name: folder / file for file in _files(folder) for name in _header(folder / file)}


def untie(where: str, config: Any) -> Any:
    """Return the config without its tie where the files hold an output matrix of their own.

    Since version 5, transformers ties output and input embeddings only if the files hold one of
    them, or both alike; 4.57 always does as the config says.

    Args:
        where: a directory, or a repository; of one that is not downloaded, and of a GGUF file, the
            config is kept.
        config: of the text model.
    """
    if transformers.__version__ < "5" or not getattr(config, "tie_word_embeddings", False):
        return config
    if is_gguf(where):  # transformers reads its matrices
        return config
    folder, kind = folder_of(where), AutoModelForCausalLM._model_mapping.get(type(config), None)
    if folder is None or kind is None:
        return config
    try:
        files = locations(folder)
    except ModelFilesBroken:  # said where weights are read
        return config
    stored, prefix = {text_name(name): name for name in files}, f"{kind.base_model_prefix}."
    for pair in (getattr(kind, "_tied_weights_keys", None) or {}).items():
        both = [stored.get(name, stored.get(name.removeprefix(prefix))) for name in pair]
        if None not in both and not _alike(*((files[name], name) for name in both if name)):
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
    return config


def _alike(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Return whether two tensors of files hold the same numbers, compared piece by piece."""
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path, _ in (one, other)]
        a, b = (file.get_slice(name) for file, (_, name) in zip(opened, (one, other), strict=True))
        if a.get_shape() != b.get_shape() or not a.get_shape():
            return False
        rows, step = a.get_shape()[0], max(1, COMPARED // max(1, prod(a.get_shape()[1:])))
        return all(torch.equal(a[i : i + step], b[i : i + step]) for i in range(0, rows, step))


def weigh(
    config: Any,
    dtype: torch.dtype,
    headers: Headers | None = None,
    packed: str | None = None,
) -> Weights:
    """Return the bytes that a model's weights take once loaded; tied parameters count once.

    Quantised weights count as they are in their files, except those that are `UNPACKED`. Of a
    wrapper's files only the text model's tensors count, as no others are loaded.

    Args:
        config: the model's config from `load_config`, from which weights without headers are
            counted; of a wrapper, its text model alone is.
        dtype: that the model is loaded in.
        headers: from `read_headers`; they must have all tensors that the model needs.
        packed: int8 or int4, in which matrices are held.

    Raises:
        ModelFilesBroken: no model can be built from the config, or tensors are missing from the
            files or have other shapes.
    """
    if packed is not None:
        plain = weigh(config, dtype, headers)  # checks the files too
        return Weights(_packed_bytes(text_config(config), dtype, packed), plain.source)
    method = quantisation(config)
    model = on_meta(text_config(config), dtype)
    needed = _parameters(model)
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # Such as what balances experts, which stays in its own type.
    buffers = {name: x for name, x in model.state_dict().items() if name not in trained}
    kept = sum(_loaded_bytes(model, name, x) for name, x in buffers.items())
    if headers is None or method in UNPACKED:
        source: WeightsSource = "config, unpacked" if method in UNPACKED else "config"
        return Weights(sum(p.nbytes for p in needed) + kept, source)
    headers = {text_name(name): x for name, x in headers.items() if not _ignored(name, config)}
    if method is not None:
        parameter_names = {name for parameter in needed for name in parameter.names}
        modules = {name.rpartition(".")[0] for name in parameter_names}
        # Scales and the like are no parameters of the model, and keep their type.
        held = (
            _nbytes(x, dtype if name in parameter_names else None)
            for name, x in headers.items()
            if any(name[: dot.start()] in modules for dot in re.finditer(r"\.", name))
        )
        return Weights(sum(held), "safetensors headers")
    missing, wrong, count = [], [], 0
    sources = _sources(model, headers, {name for x in needed for name in x.names})
    for parameter in needed:
        stored = next((sources[name] for name in parameter.names if name in sources), None)
        if stored is None:
            missing.append(parameter.names[0])
        elif not stored.gives(parameter.shape):
            first = stored.tensors[0]
            wrong.append(
                f"{parameter.names[0]} is {first.dtype} {list(first.shape)} and not "
                f"{list(parameter.shape)}"
            )
        else:
            count += parameter.nbytes
    refuse_misfits(missing, wrong)
    return Weights(count + kept, "safetensors headers")


def _packed_bytes(config: Any, dtype: torch.dtype, kind: str) -> int:
    """Return the bytes that a model holds once its matrices are packed."""
    model = on_meta(config, dtype)
    pack(model, kind)
    held = {tensor: name for name, tensor in model.state_dict(keep_vars=True).items()}
    return sum(_loaded_bytes(model, name, tensor) for tensor, name in held.items())


def _ignored(name: str, config: Any) -> bool:
    """Return whether the model leaves a tensor of its files out, such as a vision tower's.

    Its class says which it does not expect, by patterns that transformers searches names for.
    """
    model = AutoModelForCausalLM._model_mapping.get(type(config), None)
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def refuse_misfits(missing: Iterable[str], wrong: Iterable[str] = ()) -> None:
    """Refuse weights with which parts of the model would stay random.

    Args:
        missing: names of tensors that the files lack.
        wrong: a line for each tensor that does not fit.

    Raises:
        ModelFilesBroken: there are any.
    """
    for fault, tensors in (("lack", sorted(missing)), ("do not fit the config:", sorted(wrong))):
        if tensors:
            more = f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else ""
            raise ModelFilesBroken(
                f"the model's files {fault} {tensors[0]}{more}, which would be random; get the "
                "files again, or the config.json that belongs to them"
            )


def held_weights(model: nn.Module) -> Weights:
    """Return the bytes of a loaded model's weights, with the scales of quantised ones."""
    tensors = [part for tensor in model.state_dict().values() for part in parts(tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return Weights(sum(storages.values()), "loaded model")


class _Parameter(NamedTuple):
    names: list[str]  # that it may have in a file; several where it is tied
    shape: tuple[int, ...]
    nbytes: int  # once it is loaded; a few stay in float32, whatever the model is in


class _Source(NamedTuple):
    """A record of the tensors in files that make up a parameter."""

    tensors: list[Tensor]
    how: Literal["whole", "joined", "cut"]  # transformers may join tensors, or cut one up

    def gives(self, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter of that shape can be made of it."""
        if any(tensor.dtype not in FLOATS for tensor in self.tensors):
            return False
        if self.how == "whole":
            return self.tensors[0].shape == shape
        return self.how == "cut" or sum(prod(x.shape) for x in self.tensors) == prod(shape)


def _sources(model: Any, headers: Headers, parameter_names: set[str]) -> dict[str, _Source]:
    """Return the tensors in files for every parameter, by its name.

    Other names and parts, such as a matrix for each expert, are put together as transformers does
    when it loads them; its 4.57 loads everything as it is.
    """
    sources = {
        name: _Source([tensor], "whole")
        for name, tensor in headers.items()
        if name in parameter_names
    }
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return sources
    steps = get_model_conversion_mapping(model)
    for name in headers.keys() - parameter_names:
        target, converter = name, None
        for step in sorted(steps, key=lambda step: isinstance(step, WeightConverter)):
            target, matched = step.rename_source_key(target)
            if matched is not None and isinstance(step, WeightConverter):
                converter = step
                break
        if converter is None:
            sources.setdefault(target, _Source([headers[name]], "whole"))
        elif len(converter.target_patterns) == 1:
            sources.setdefault(target, _Source([], "joined")).tensors.append(headers[name])
        else:
            first = converter.target_patterns[0]
            for pattern in converter.target_patterns:
                whole_name = target.replace(first, pattern, 1)
                sources.setdefault(whole_name, _Source([], "cut")).tensors.append(headers[name])
    return sources


def on_meta(config: Any, dtype: torch.dtype) -> Any:
    """Return the model that the config describes, without data."""
    try:
        with torch.device("meta"):
            # The attention is given, as a config may name a kernel that would be fetched and run.
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, trust_remote_code=False, dtype=dtype
            )
    except Exception as error:  # whatever a model's constructor makes of its config's values
        raise ModelFilesBroken(
            f"config.json describes no model that can be built ({first_line(error)}); get the "
            "config.json that belongs to the weights"
        ) from error


def _parameters(model: Any) -> list[_Parameter]:
    """Return the parameters of a model; tied ones are one."""
    names: dict[Any, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Files of a model without its head lack the prefix, and are loaded all the same.
        names[parameter] += [name, name.removeprefix(f"{model.base_model_prefix}.")]
    return [
        _Parameter(names_of, tuple(p.shape), _loaded_bytes(model, names_of[0], p))
        for p, names_of in names.items()
    ]


def _loaded_bytes(model: Any, name: str, tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter or buffer once it is loaded, of a model made in its type."""
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    named = any(re.search(pattern.replace("*", ".*"), name) for pattern in wide)
    if named and tensor.is_floating_point():
        return 4 * tensor.numel()
    return tensor.nbytes


def _in_folder(folder: Path) -> Headers | None:
    files, headers = _files(folder), Headers()
    for name in files:
        if not (folder / name).is_file():
            raise ModelFilesBroken(f"{name!r} is not in {str(folder)!r}; get it again")
        headers |= _header(folder / name)
    return headers if files else None


def _header(path: Path) -> Headers:
    try:
        # As NumPy sees it: for PyTorch, the system would have to promise memory for all of it.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            return {k: Tensor(x.get_dtype(), tuple(x.get_shape())) for k, x in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelFilesBroken(
            f"{str(path)!r} is broken or was cut short ({first_line(error)}); get it again"
        ) from error


def _files(folder: Path) -> list[str]:
    """Return the names of the files of weights in `folder`, in the order of loading."""
    # Newer transformers prefer these, which other programs write, to the files that are read here.
    if any(folder.glob("shard-*-model-*-of-*.safetensors")):
        raise ModelFilesBroken(
            f"{str(folder)!r} holds a distributed checkpoint; save it once with save_pretrained"
        )
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder / INDEX)
    if any(file for kind in PICKLES for file in folder.glob(kind)):
        raise ModelFilesBroken(f"{str(folder)!r} cannot be loaded: {NO_PICKLES}")
    return []


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index lists, all of which lie beside it."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        foreign = [name for name in names if not re.fullmatch(r"[^/\\]+\.safetensors", name)]
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise ModelFilesBroken(
            f"{str(index)!r} is no index of safetensors files ({first_line(error)}); get it again"
        ) from error
    if foreign:
        raise ModelFilesBroken(
            f"{str(index)!r} names {foreign[0]!r}, which is no safetensors file beside it; get the "
            "files again"
        )
    return names


def _on_the_hub(repository: str) -> Headers | None:
    try:
        files = get_safetensors_metadata(repository).files_metadata.values()
    except NotASafetensorsRepoError as error:
        raise ModelFilesBroken(f"{repository!r} cannot be loaded: {NO_PICKLES}") from error
    except SafetensorsParsingError as error:
        raise ModelFilesBroken(
            f"{repository!r} has broken files ({first_line(error)}); give another repository"
        ) from error
    except Exception:  # offline; what the client raises differs between its versions
        return None
    return {k: Tensor(x.dtype, tuple(x.shape)) for file in files for k, x in file.tensors.items()}


def _nbytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Return a tensor's bytes once loaded: plain floats become `dtype`, others keep their type."""
    bits = re.search(r"\d+", tensor.dtype)  # as in I8, F8_E4M3; BOOL has none
    stored = int(bits[0]) if bits else 8
    if dtype is not None and tensor.dtype in FLOATS:
        return prod(tensor.shape) * dtype.itemsize
    return prod(tensor.shape) * stored // 8
