"""Loads a model from a stranger's directory or repository, and refuses broken files by name.

Nothing in it is executed: no pickles and no code of its own; templates run in a sandbox.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.utils import logging

from kvcap.runtime.errors import (
    ExtraMissing,
    ModelFilesBroken,
    ModelNotFound,
    PlanInfeasible,
    UnsupportedModel,
    first_line,
)
from kvcap.runtime.files import check_folder
from kvcap.runtime.memory.free_memory import return_freed
from kvcap.runtime.models.checkpoint import (
    Checkpoint,
    add_biases,
    empty_model,
    fill,
    fill_buffers,
    unused_tensors,
)
from kvcap.runtime.models.config import FAMILIES, ModelShape
from kvcap.runtime.models.gguf import (
    TOKENS,
    header,
    is_gguf,
    loading,
    read_gguf,
    reading,
    source,
)
from kvcap.runtime.models.names import ADAPTER, holds_adapter
from kvcap.runtime.models.packed import pack
from kvcap.runtime.models.quantised import UNPACKED, check_packages, quantisation, unpacking
from kvcap.runtime.models.rope import rope_of
from kvcap.runtime.models.splits import check_words, split_as_named
from kvcap.runtime.models.weights import download, read_headers, refuse_misfits, untie, weigh
from kvcap.runtime.models.wrappers import NAMES, is_wrapper, text_config
from kvcap.runtime.types import ATTENTION, NEUTRAL

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
PEFT = ("models.auto.auto_factory", "modeling_utils", "integrations.peft")
"""Modules of transformers that look for adapters."""
MOST_LAYERS = 10_000  # a config with more would fill the memory before it could be checked


def load_config(where: str) -> Any:
    """Return the model's checked config; for a wrapper, its text model's.

    Its `tie_word_embeddings` says what transformers makes of the files, if they are here.

    Raises:
        ModelNotFound: no such directory or repository, or it holds no config.
        ModelFilesBroken: the config is no JSON, or its values make no model; or the directory holds
            a pipe, a device or a text too large to be read.
        UnsupportedModel: kvcap does not run this kind of model.
    """
    folder = Path(where)
    if is_gguf(where):
        return _config_in_gguf(where)
    if folder.is_dir():
        try:
            check_folder(folder)
        except (OSError, ValueError) as error:
            raise _broken(where, "a file", error) from error
    there = (folder / "config.json").is_file()
    try:
        if folder.is_dir() and not there:
            raise ModelNotFound("there is no config.json")
        fields, _ = PretrainedConfig.get_config_dict(where)
    except Exception as error:
        if there:
            raise _broken(where, "config.json", error) from error
        raise ModelNotFound(
            f"no model at {where!r}: give 'pocket', a directory with config.json, or a repository "
            f"of the hub that can be reached ({first_line(error)})"
        ) from error
    try:
        if (folder / "custom_generate").exists():  # 4.57 runs it, whatever it is told to trust
            raise ValueError("beside it is code, in custom_generate; remove that folder")
        config = _checked(where, fields)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever transformers makes of values that it does not expect
        raise _broken(where, "config.json", error) from error
    if (folder / ADAPTER).is_file():
        _check_adapter(where)
    return untie(where, config)


def _check_adapter(where: str) -> None:
    """Refuse an adapter without the model that it is of; say that one beside a model is left out.

    Raises:
        ModelNotFound: there are no weights but the adapter's.
        ModelFilesBroken: as `read_headers`.
    """
    if read_headers(where) is None:
        raise ModelNotFound(f"the directory {where!r} {holds_adapter(Path(where))}")
    warnings.warn(
        f"the adapter beside the model in {where!r} ({ADAPTER}) is not applied; merge it to have "
        "its answers, or remove the file",
        stacklevel=3,
    )


def _config_in_gguf(where: str) -> Any:
    """Return the config that transformers makes of a GGUF file's fields."""
    file = read_gguf(where)
    folder, options = source(where)
    try:
        with reading(where):
            fields, _ = PretrainedConfig.get_config_dict(folder, **options)
    except Exception as error:
        if "architecture" not in str(error):
            raise _broken(where, "the fields", error) from error
        raise UnsupportedModel(
            f"{where!r} holds a model of {file.architecture!r}, which transformers does not read "
            "from GGUF; give the repository or directory that it was made from, with safetensors"
        ) from error
    if (tokens := header(where).fields.get(TOKENS)) is not None:
        fields.setdefault("vocab_size", len(tokens.data))
    try:
        config = _checked(where, fields)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever transformers makes of values that it does not expect
        raise _broken(where, "the fields", error) from error
    if file.scaled and rope_of(config).kind == "default":
        raise UnsupportedModel(
            f"{where!r} stretches its rotary embedding (RoPE) to longer contexts, which "
            "transformers does not read from GGUF, so that its logits would be wrong; give the "
            "repository or directory that it was made from, with safetensors"
        )
    add_biases(where, config)
    if unused := unused_tensors(where, config):
        raise UnsupportedModel(
            f"{where!r} has tensors that transformers' {config.model_type!r} does not use, so that "
            f"its logits would be wrong: {', '.join(unused)}; give the repository or directory "
            "that it was made from, with safetensors"
        )
    if getattr(config, "dtype", None) is None and file.numbers != "F32":
        config.dtype = torch.bfloat16
    if file.ends:
        config.eos_token_id = file.ends if len(file.ends) > 1 else file.ends[0]
    return config


def _checked(where: str, fields: dict[str, Any]) -> Any:
    """Return the config, if it is of a known kind of model and its values are usable."""
    kind = fields.get("model_type")
    if not kind:
        raise ValueError("it names no model_type")
    if kind not in CONFIG_MAPPING:
        own = "; code that comes with a model is not run" if "auto_map" in fields else ""
        raise UnsupportedModel(
            f"model type {kind!r} is not known{own}; supported: {', '.join(FAMILIES)}"
        )
    for part in (fields, *(part for part in fields.values() if isinstance(part, dict))):
        if (layers := part.get("num_hidden_layers", 0)) > MOST_LAYERS:
            raise ValueError(f"it asks for {layers:,} layers")
    if fields.get("transformers_weights") is not None:
        raise ValueError("it names other files of weights, in transformers_weights")
    if is_gguf(where):
        config: Any = CONFIG_MAPPING[kind].from_dict(fields)
    else:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    if is_wrapper(config):
        config = _text_of(config)
    config._attn_implementation = ATTENTION  # it may name a kernel, which would be fetched and run
    dtype = getattr(config, "dtype", None)
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"models do not run in {dtype}")
    ModelShape.of(config)
    return config


def _text_of(wrapper: Any) -> Any:
    """Return the config of a wrapper's text model.

    Raises:
        UnsupportedModel: it does not run, saying which wrapper it is of.
    """
    text = text_config(wrapper)
    method = quantisation(text)
    if method is not None and method not in UNPACKED:
        raise UnsupportedModel(
            f"{wrapper.model_type!r} reads more than text, and transformers cannot give weights "
            f"quantised by {method!r} to its text model alone; load it whole and use kvcap.cap, or "
            f"give it unquantised, or by {' or '.join(UNPACKED)}"
        )
    try:
        ModelShape.of(text)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{wrapper.model_type!r} reads more than text, around a text model: {error}"
        ) from error
    return text


def load_tokenizer(where: str) -> Any:
    """Return the model's tokenizer, which was tried on a word.

    Raises:
        ExtraMissing: a package that reads a GGUF file is not installed.
        ModelFilesBroken: its files are missing or broken, or need code of their own.
        UnsupportedModel: a GGUF file splits text in a way that is not known.
    """
    folder = Path(where)
    if folder.is_dir() and not any((folder / name).exists() for name in VOCABULARIES):
        raise ModelFilesBroken(
            f"{where!r} has no tokenizer: there is no tokenizer.json; copy the tokenizer's files "
            "there from where the model comes from (in Python: tokenizer.save_pretrained)"
        )
    path, options = source(where)

    try:
        with reading(where, vocabulary=True):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
        if options:
            tokenizer = split_as_named(where, tokenizer)
            check_words(where, tokenizer)
        return_freed()  # reading 262,144 tokens takes 200 MB meanwhile
        if not tokenizer("Hello", add_special_tokens=False).input_ids:
            raise ValueError("its vocabulary has no letters")
        if not tokenizer.is_fast:
            raise ValueError("it has no tokenizer.json")
    except (ExtraMissing, UnsupportedModel):
        raise
    except Exception as error:  # the library's own are of no kind of their own
        raise _broken(where, "the tokenizer", error) from error
    return tokenizer


def find_tokenizer(where: str) -> Any:
    """Return the tokenizer of a model, if its files are here; None where they would be downloaded.

    Raises:
        ModelFilesBroken: they are broken, or need code of their own.
    """
    folder = Path(where)
    if folder.is_dir():
        here = any((folder / name).exists() for name in VOCABULARIES)
    else:
        here = is_gguf(where) or isinstance(try_to_load_from_cache(where, VOCABULARIES[0]), str)
    return load_tokenizer(where) if here else None


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the opening token, if the tokenizer sets one before a text, and the text's tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    opening: list[int] = tokenizer("")["input_ids"][:1]
    sets_one = opening == [tokenizer.bos_token_id] != ids[:1]
    return opening if sets_one else [], ids


def check_generation(where: str) -> None:
    """Refuse a model with unusable generation settings; it may have none.

    A GGUF file has none but its config's: those of a model beside it are not read.

    Raises:
        ModelFilesBroken: they are no JSON, or no numbers where they must be.
    """
    if is_gguf(where):
        return
    try:
        settings = GenerationConfig.from_pretrained(where)
        for name in NEUTRAL:
            float(getattr(settings, name, None) or 0)
        if not isinstance(settings.do_sample, (bool, type(None))):
            raise ValueError(f"do_sample is {settings.do_sample!r}, neither true nor false")
        ends = settings.eos_token_id or 0
        [int(token) for token in (ends if isinstance(ends, list) else [ends])]
    except Exception as error:  # whatever transformers makes of values that it does not expect
        if not isinstance(error, OSError) or Path(where, "generation_config.json").exists():
            raise _broken(where, "generation_config.json", error) from error


def load_generation(where: str, config: Any) -> Any:
    """Return the model's settings of generation, as `load_model` gives them to it.

    Raises:
        ModelFilesBroken: as `check_generation`.
    """
    check_generation(where)
    if not is_gguf(where):
        with suppress(OSError):  # it has none but its config's
            return GenerationConfig.from_pretrained(where)
    return GenerationConfig.from_model_config(config)


def load_model(where: str, config: Any, dtype: torch.dtype, room: int | None = None) -> Any:
    """Return the model with kvcap's attention, its tensors from safetensors files or a GGUF file.

    Args:
        where: its directory, GGUF file or repository.
        config: from `load_config`.
        dtype: that its weights are converted to.
        room: bytes that weights may take meanwhile, where the process has a cap.

    Raises:
        PlanInfeasible: there is no room to unpack a GGUF file.
        ModelFilesBroken: files cannot be read, or their tensors are missing or of other shapes,
            so that transformers would fill them at random.
        UnsupportedModel: a package is missing, such as one that reads quantised weights.
    """
    check_packages(config)
    method = quantisation(config)
    if method in UNPACKED:
        config = unpacking(config)
    folder, options = source(where)
    packed = bool(options)
    if packed and room is not None:  # transformers has all weights in float32, some of them twice
        takes = 2 * weigh(config, torch.float32).nbytes + Path(where).stat().st_size
        if takes > room:
            raise PlanInfeasible(
                f"unpacking {where!r} takes {takes:,} bytes meanwhile, {takes - room:,} more than "
                "the cap leaves; raise it, let llama.cpp's library run the file (leave --backend "
                "torch out), or save the unpacked model once by save_pretrained"
            )
    options |= loading() if packed else {"use_safetensors": True}
    wrapped = not packed and _kind(where) != config.model_type
    if wrapped and transformers.__version__ < "5":
        _check_names(where)
    try:
        with _quiet(wrapped), _without_peft(), reading(where):
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # named below
                output_loading_info=True,
                key_mapping=NAMES if wrapped else None,
                **options,
            )
    except ImportError as error:
        raise UnsupportedModel(
            f"{where!r} needs a package that is not installed: {first_line(error)}"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise _broken(where, "the weights", error) from error
    except Exception as error:  # whatever the libraries that read quantised weights raise
        if packed:
            raise _broken(where, "the weights", error) from error
        if method is None:
            raise
        raise UnsupportedModel(
            f"weights quantised by {method!r} cannot be loaded here: {first_line(error)}"
        ) from error
    # transformers 4.57 forgets a tied parameter whose file has only its other name.
    lost = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    wrong = [x if isinstance(x, str) else x[0] for x in report["mismatched_keys"]]  # 4.57: names
    refuse_misfits(lost.union(report["missing_keys"]), wrong)
    if wrapped:  # transformers would save it under patterns turned around; it is a model by itself
        vars(model).pop("_weight_conversions", None)
    if packed:
        model.generation_config = GenerationConfig.from_model_config(config)
    if method in UNPACKED:  # into bfloat16, whatever was asked for
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def load_packed(
    where: str, config: Any, dtype: torch.dtype, kind: str, room: int | None = None
) -> Any:
    """Return the model with its matrices in 8 or 4 bits, on a CPU.

    Weights are rounded as they are read, piece by piece, where files have the model's own; else
    the whole model is loaded first.

    Args:
        where: its directory, GGUF file or repository.
        config: from `load_config`, with which `check_packing` agreed.
        dtype: of all else.
        kind: int8 or int4.
        room: bytes that weights may take meanwhile, where the process has a cap.

    Raises:
        ModelFilesBroken, UnsupportedModel: as `load_model`.
        PlanInfeasible: the whole model must be loaded first, and there is no room for it.
    """
    download(where)
    config = untie(where, config)  # its files may have come by this download
    model = empty_model(where, config, dtype)
    checkpoint = Checkpoint.of(where, model, dtype)
    if checkpoint is None:
        whole = 0 if room is None else weigh(config, dtype).nbytes
        if room is not None and whole > room:
            raise PlanInfeasible(
                f"weights of {where!r} cannot be rounded one by one as they are read, and all "
                f"together take {whole:,} bytes, {whole - room:,} more than the cap leaves; raise "
                "it, or save the model once by save_pretrained"
            )
        model = load_model(where, config, dtype, room)
        pack(model, kind)
        return_freed()
        return model
    pack(model, kind, lambda name: partial(checkpoint.rows, name))
    for part, name, _ in fill(model, checkpoint):
        parameter = getattr(part, name)
        parameter.data = parameter.data.clone()  # else it would keep its file in memory
    fill_buffers(model, checkpoint)
    return_freed()
    return model


def _kind(where: str) -> Any:
    """Return the type of model that the files' config names."""
    return PretrainedConfig.get_config_dict(where)[0].get("model_type")


def _check_names(where: str) -> None:
    """Refuse a wrapper's files whose names transformers 4.57 cannot give to the text model."""
    if not any(name.startswith("model") for name in read_headers(where) or ["model"]):
        raise UnsupportedModel(
            f"transformers {transformers.__version__} cannot load the text model of {where!r} "
            "without its wrapper; install transformers 5"
        )


@contextmanager
def _without_peft() -> Iterator[None]:
    """Have transformers load a model alone, whether peft is installed or not.

    With peft it would add an adapter beside the model; its 4.57 would load the adapter's base, from
    wherever that is.
    """
    homes: list[Any] = [import_module(f"transformers.{name}") for name in PEFT]
    with ExitStack() as stack:
        for home in (home for home in homes if hasattr(home, "is_peft_available")):
            stack.callback(setattr, home, "is_peft_available", home.is_peft_available)
            home.is_peft_available = lambda: False
        yield


@contextmanager
def _quiet(wrapped: bool) -> Iterator[None]:
    """Keep transformers from listing the tensors of a wrapper that are left out on purpose."""
    level = logging.get_verbosity()
    try:
        if wrapped:
            logging.set_verbosity_error()
        yield
    finally:
        logging.set_verbosity(level)


def _broken(where: str, part: str, error: Exception) -> ModelFilesBroken:
    return ModelFilesBroken(
        f"{part} of {where!r} cannot be used: {first_line(error)}; get the files again, or give a "
        "model that transformers can load without running its code"
    )
