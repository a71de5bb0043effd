"""Defines the command line's options, each once; a command takes them in groups.

`kvcap --help` imports this, so nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from kvcap.runtime.cache.formats import CHOICES
from kvcap.runtime.cache.settings import CacheSettings, SettingNames
from kvcap.runtime.cli.declare import again, argument, setting
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.files import as_text, parse_json, read_text
from kvcap.runtime.models.formats import NAMES
from kvcap.runtime.models.gguf import loadable
from kvcap.runtime.models.names import is_export, names_gguf
from kvcap.runtime.planning.plan import AUTO, parse_cap
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.session.settings import NUMBERS
from kvcap.runtime.types import BUILT_IN, DEFAULT_POLICY, PINS, POCKET
from kvcap.runtime.units import parse_bytes

if TYPE_CHECKING:  # PyTorch stands behind it
    from typing_extensions import Unpack

    from kvcap.policies import Eviction

OLD_VARIABLES = {
    "KVCAP_KV_BUDGET_TOKENS": "KVCAP_BUDGET_TOKENS",
    "KVCAP_BUDGET": "KVCAP_BUDGET_TOKENS",
    "KVCAP_BLOCK": "KVCAP_BLOCK_SIZE",
}
"""Maps names of 0.1 to those to use. Unread, they would leave a cap at its default in silence."""
STDIN = "-"


def check_variables() -> None:
    """Refuse variables of the environment by names that earlier versions took.

    Raises:
        ValueError: naming both.
    """
    for old, new in OLD_VARIABLES.items():
        if old in os.environ:
            raise ValueError(f"the environment sets {old}, which is called {new} now; rename it")


def pairs(texts: list[str]) -> dict[str, Any]:
    """Read options from KEY=VALUE texts; values are Python literals where they can be, else text.

    Raises:
        ValueError: no key, or no '='.

    >>> pairs(["window=16", "anchor=median"])
    {'window': 16, 'anchor': 'median'}
    """
    return _key_values(texts, ast.literal_eval, "window=16")


def template_options(texts: list[str]) -> dict[str, Any]:
    """Read options of a chat template from KEY=VALUE texts; values are JSON where they can be.

    Raises:
        ValueError: no key, or no '='.

    >>> template_options(["enable_thinking=false", "reasoning_effort=low"])
    {'enable_thinking': False, 'reasoning_effort': 'low'}
    """
    return _key_values(texts, parse_json, "enable_thinking=false")


def _key_values(texts: list[str], parse: Callable[[str], Any], example: str) -> dict[str, Any]:
    """Read KEY=VALUE texts; a value that `parse` refuses stays a text.

    Raises:
        ValueError: no key, or no '='; says it by the `example`.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"{text!r} is not KEY=VALUE, such as {example}")
        try:
            values[key] = parse(value)
        except (ValueError, SyntaxError):
            values[key] = value
    return values


def _size(text: str | None) -> str | None:
    """Check an option's size, without changing it."""
    try:
        if text is not None:
            parse_bytes(text)
    except PlanInfeasible as error:
        raise click.BadParameter(str(error)) from error
    return text


def _cap(text: str | None) -> str | None:
    return text if text == AUTO else _size(text)


def _weights(given: str) -> str:
    """Check the name of a type of weights, without changing it."""
    if given not in NAMES:
        raise click.BadParameter(f"{given!r} is none of {', '.join(map(repr, NAMES))}.")
    return given


def _chat_template(given: str | None) -> str | None:
    """Check a chat template's name or file before the model is loaded, without changing it."""
    if given is not None:
        from kvcap.runtime.session.named_templates import check_given

        check_given(given)
    return given


def checked_folder(path: Path) -> Path:
    """Check that a path is a folder or can become one, before anything is computed for it."""
    above = next((part for part in (path, *path.parents) if part.exists()), path)
    if not above.is_dir():
        raise click.BadParameter(f"{str(above)!r} is a file, not a folder")
    return path


def policy_names(incomplete: str) -> list[str]:
    """Return policies that begin like this, for the shell; after a plus sign, companions.

    They are found without importing PyTorch, for which a key press cannot wait.
    """
    spec = find_spec("kvcap.policies")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    base, plus, last = incomplete.rpartition("+")
    if plus:
        names = {
            name for sub in folder.iterdir() if sub.name != "base" for name in _module_names(sub)
        }
    else:
        names = {*_module_names(folder), *_preset_names(folder)}
    return sorted(f"{base}{plus}{name}" for name in names if name.startswith(last))


def _module_names(folder: Path) -> list[str]:
    """Return the names of a folder's files, which are those of its policies."""
    return [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]


def _preset_names(folder: Path) -> Iterator[str]:
    """Yield the keys of the dictionary `presets` of every policy's class, from the sources."""
    for path in (*folder.glob("*.py"), *folder.glob("*/*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.AnnAssign(target=ast.Name(id="presets"), value=ast.Dict(keys=keys)):
                    yield from (ast.literal_eval(key) for key in keys if key is not None)


def read_schema(given: str) -> dict[str, Any]:
    """Read a JSON schema from a file, from stdin for '-', or from a text in braces.

    Raises:
        ValueError: there is none.
    """
    if given.lstrip().startswith("{"):
        name, text = "--json-schema", given
    elif given == STDIN:
        name, text = "stdin", as_text(sys.stdin.buffer.read(), "stdin")
        if not text.strip():
            raise ValueError("stdin is empty, or was the prompt; give the JSON schema in a file")
    else:
        name, text = repr(given), read_text(given)
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise ValueError(f"there is no JSON schema in {name}: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(
            f"the JSON in {name} is no schema; give an object in braces, such as "
            '{"type": "object"}'
        )
    return schema


MODEL: Any = argument(
    POCKET,
    "Use this model: a repository of the hub, a local directory, a GGUF file, "
    "smollm2, a chat model that is downloaded once, or pocket, which is built in (as are "
    "pocket-plain and pocket-text).",
    metavar="MODEL",
    env=True,
)
DEVICE: Any = setting(
    None,
    "Run on cpu, cuda or mps (the best there is by default).",
    metavar="NAME",
    panel="Device",
)
EVICT_EVERY: Any = setting(
    1,
    "While answering, evict every N tokens. More than 1 switches CUDA graphs off.",
    min=1,
    panel="Memory",
)
THREADS: Any = setting(
    None,
    "Compute with N threads of the CPU (all cores, or OMP_NUM_THREADS, by default).",
    min=1,
    panel="Device",
)
SHARED_PROMPTS: Any = setting(
    None,
    "Keep the slots of N system prompts, from which further conversations of the "
    "same API key begin; 0 keeps none (by default 4, or with --memory-cap one for every 8 "
    "conversations that fit, up to 4).",
    min=0,
    panel="Limits",
)
JSON: Any = setting(False, "Print one JSON document per result.", panel="Output")


@dataclass(frozen=True)
class CacheOptions:
    """Options that say how much is kept, whatever the policy."""

    heading: ClassVar = "Memory"

    kv_budget: str | None = setting(
        None,
        "Keep at most so many bytes of keys and values, such as 256KiB or 64MiB.",
        metavar="BYTES",
        check=_size,
    )
    budget_tokens: int | None = setting(
        None,
        "Keep at most N slots per KV head and layer (256 by default; under --policy full "
        "the model's context, or what memory holds of it); instead of --kv-budget.",
        min=1,
    )
    memory_cap: str | None = setting(
        None,
        "Hold the whole process, weights included, within so many bytes, or within "
        "all that is free (auto). The largest budget that fits is taken.",
        metavar="BYTES",
        check=_cap,
    )
    block_size: int | None = setting(
        None,
        "Read N tokens at once (by default 128, on CUDA 512 from 1,024 slots on, fewer "
        "where --kv-budget is small).",
        min=1,
    )
    sink_tokens: int | None = setting(
        None,
        "Never evict the first N tokens, besides those that the policy keeps (4 by "
        "default, fewer where less than 32 slots would stay unpinned; 0 runs the "
        "policy as in its paper).",
        min=0,
    )
    recent_tokens: int | None = setting(None, "Never evict the newest N tokens.", min=0)
    positions: Literal["compact", "true", "auto"] | None = setting(
        None,
        "Renumber kept tokens from 0 (compact, the default where that is exact), "
        "leave their positions as they are (true), or renumber them once the text is "
        "longer than what the model was trained on (auto).",
    )
    dtype: str | None = setting(
        None,
        "Compute in float32, bfloat16 or float16, also written fp32, bf16, fp16, half "
        "(the checkpoint's type by default).",
        metavar="NAME",
        panel="Model",
    )
    kv_dtype: str | None = setting(
        None,
        "Quantise kept keys and values: both to 8 bits, keys to 8 and values to 4, or "
        "both to 4, so that the same bytes keep more (by default they stay as they "
        "are). A GGUF file takes q8_0 and q4_0, llama.cpp's own.",
        choices=(*CHOICES, "q8_0", "q4_0"),
    )

    @property
    def pins(self) -> dict[str, int]:
        """Return the options of `PINS` that were given."""
        return {name: n for name in PINS if (n := getattr(self, name)) is not None}

    def settings(self, **more: Unpack[SettingNames]) -> CacheSettings:
        """Return the settings of a cache that were given, and `more` of them.

        Raises:
            ValueError: both budgets were given.
        """
        if self.kv_budget is not None and self.budget_tokens is not None:
            raise ValueError("give --kv-budget or --budget-tokens, not both")
        given = CacheSettings(
            self.budget_tokens,
            self.block_size,
            positions=self.positions,
            kv_dtype=self.kv_dtype,  # llama.cpp's types, too, which others refuse
            kv_budget=self.kv_budget,
        )
        return CacheSettings.of((given,), more)


@dataclass(frozen=True)
class Budget(CacheOptions):
    """A group of options that say how much is kept, and by which policy."""

    policy: str | None = setting(
        None,
        f"Choose what is evicted by this policy (by default {DEFAULT_POLICY}, or an "
        "export's own). `kvcap policies` lists all.",
        metavar="NAME",
        complete=policy_names,
    )
    policy_option: list[str] | None = setting(
        None, "Set an option of the policy; repeatable.", metavar="KEY=VALUE"
    )
    enforce: Literal["check", "rlimit"] = setting(
        "check",
        "Hold --memory-cap by checking before every block, or by a limit of the "
        "operating system as well.",
    )

    def eviction(self) -> Eviction:
        """Return the policy with its options.

        Raises:
            PolicyError: unknown names, refused values.
        """
        from kvcap.policies import load_policy

        options = {**self.pins, **pairs(self.policy_option or [])}
        return load_policy(self.policy or DEFAULT_POLICY, **options)


@dataclass(frozen=True)
class Backend:
    """A group of options that say what runs the model."""

    heading: ClassVar = "Model"

    backend: Literal["llamacpp", "torch", "onnxruntime"] | None = setting(
        None,
        "Run the model by llama.cpp's library (the default for a GGUF file, where it is "
        "found), in ONNX Runtime (for a directory that `kvcap export decoder` wrote), or in "
        "PyTorch (for all others).",
    )

    weights: str | None = setting(
        None,
        "Run MODEL on the CPU with weights of 8 or 4 bits. ONNX Runtime runs an export "
        "that is made once, in the cache folder; --backend torch rounds the weights whenever "
        "it loads them.",
        metavar=f"[{'|'.join(NAMES)}]",
        check=_weights,
    )

    calibrate: Path | None = setting(
        None,
        "Round --weights int4 by a text like those that MODEL will read: the export "
        "takes minutes, and loses less. With --kv-dtype int8, keys and values are "
        "measured by it.",
        metavar="FILE",
    )

    def kept(self, model: str) -> str | None:
        """Return the type of weights with which an export of `model` is made in the cache folder.

        Returns:
            None where `model` is run as it is, or is not exported.
        """
        return self.weights if self.exported(model) else None

    def by_llamacpp(self, model: str) -> bool:
        """Return whether llama.cpp's library is to run `model`.

        Raises:
            UnsupportedModel: it was requested, and the model is no GGUF file.
            ValueError: nothing is to be calibrated.
        """
        if self.calibrate is not None and self.weights is None:
            raise ValueError("--calibrate is for --weights int4; add that, or leave it out")
        file = names_gguf(model)
        if self.backend == "llamacpp":
            if not file:
                raise UnsupportedModel(
                    f"--backend llamacpp runs GGUF files, and {model!r} is none; give one, or "
                    "leave --backend llamacpp out"
                )
            if self.weights is not None:
                raise UnsupportedModel(
                    f"--weights {self.weights} is not for llama.cpp, which runs a file's weights "
                    "as they are; leave one of the two out"
                )
            return True
        if not file or self.backend is not None or self.weights is not None:
            return False
        from kvcap.runtime.backends.llamacpp.library import find_library

        return find_library() is not None or not loadable()  # whose one message says what to do

    def exported(self, model: str) -> bool:
        """Return whether `model` is to be run as an exported decoder."""
        if self.backend == "torch":
            if self.calibrate is not None:
                raise ValueError("--calibrate is for exports; leave it or --backend torch out")
            if model not in BUILT_IN and is_export(model):
                raise UnsupportedModel(
                    f"{model!r} is an exported decoder, which ONNX Runtime runs and PyTorch does "
                    "not; leave --backend torch out, or name the model that it was made from"
                )
            return False
        if self.weights is not None or self.backend == "onnxruntime":
            return True
        return model not in BUILT_IN and is_export(model)


CHAT_TEMPLATE: Any = setting(
    None,
    "Write chats by this Jinja template, or by a common one: alpaca, chatml, "
    "gemma, llama-2, llama-3, mistral, phi-3, vicuna or zephyr (the model's own "
    "by default).",
    metavar="FILE|NAME",
    check=_chat_template,
    panel="Model",
)


@dataclass(frozen=True)
class Running:
    """A group of options that say how the model runs."""

    heading: ClassVar = "Conversation"

    system_prompt: str | None = setting(
        None, "Put this text before the conversation, as its system message."
    )
    pin_system: bool = setting(False, "Never evict the system prompt.")
    session: str | None = setting(
        None,
        "Continue the conversation in this file, if there is one, and save it after every answer.",
        metavar="FILE",
    )
    device: str | None = again(DEVICE)
    gpu_layers: int = setting(
        0,
        "Run N layers of a GGUF file on a GPU, if llama.cpp was built for one (-1: all).",
        min=-1,
        panel="Model",
    )
    threads: int | None = again(THREADS)
    chat_template: str | None = again(CHAT_TEMPLATE)
    on_full: Literal["evict", "stop", "error"] = setting(
        "evict",
        "When the budget is used up, evict, end the answer, or fail with exit code 4.",
        panel="Memory",
        show=True,
    )
    evict_every: int | None = setting(
        None,
        "While answering, evict every N tokens (64 on a CPU, 1 on a GPU, where more "
        "switch CUDA graphs off).",
        min=1,
        panel="Memory",
    )


@dataclass(frozen=True)
class Recalling:
    """A group of options that say how much evicted text is read again."""

    heading: ClassVar = "Recall"

    recall: str = setting(
        "auto",
        "Read at most N evicted tokens again in front of a message that asks about "
        "them, never more than there are slots (auto: a third of the budget).",
        metavar="auto|off|N",
        show=True,
    )
    recall_store: str | None = setting(
        None,
        "Limit the memory of a conversation's text index (8MiB by default, less under "
        "a --memory-cap below 256MiB; 1MiB for each of a server's).",
        metavar="SIZE",
        check=_size,
    )

    def settings(self, memory_cap: str | None = None) -> RecallSettings:
        """Return the settings of recall as a session takes them.

        Args:
            memory_cap: of the process, as `Budget` has it.

        Raises:
            ValueError: naming what would work.
        """
        cap = None if memory_cap is None else parse_cap(memory_cap)
        return RecallSettings.parse(self.recall, self.recall_store, cap)

    def served(self) -> RecallSettings:
        """Return the settings of recall of a server, whose indexes are smaller by default.

        Raises:
            ValueError: naming what would work.
        """
        return RecallSettings.parse(self.recall, self.recall_store, served=True)


def _number(name: str, help: str, *names: str, **more: Any) -> Any:
    """Return the declaration of a setting of generation, in the bounds that Python holds it to."""
    bounds = NUMBERS[name]
    high = None if bounds.high == inf else bounds.high
    limits = {"min": bounds.low, "max": high, "above": bounds.above}
    return setting(None, help, *names, **limits, **more)


@dataclass(frozen=True)
class Sampling:
    """A group of options that say how the next token is drawn; None: the model's own setting."""

    heading: ClassVar = "Sampling"

    max_new_tokens: int | None = _number(
        "max_new_tokens", "Answer with at most N tokens (the model's limit, or 512, by default)."
    )
    thinking_budget: int | None = _number(
        "thinking_budget",
        "Close the model's thoughts at N tokens, and have its answer begin; 0: it does "
        "not think. An answer is then of at most 512 + N tokens by default.",
    )
    temperature: float | None = _number(
        "temperature",
        "Divide logits by X before drawing; 0 always takes the likeliest token.",
    )
    top_p: float | None = _number(
        "top_p",
        "Draw from the likeliest tokens that together have probability X; 0 takes the likeliest.",
    )
    top_k: int | None = _number("top_k", "Draw from the N likeliest tokens; 0 draws from all.")
    min_p: float | None = _number(
        "min_p", "Drop tokens that are less probable than X times the likeliest."
    )
    repetition_penalty: float | None = _number(
        "repetition_penalty",
        "Make tokens that occurred before less likely, by dividing by X; 1 changes nothing.",
    )
    dry_multiplier: float | None = _number(
        "dry_multiplier",
        "Keep an answer from saying a passage of its own again (DRY): take X from the logit of "
        "what would go on with 8 tokens as before, 1.75 times as much for each further token; 0 "
        "changes nothing.",
    )
    seed: int | None = setting(None, "Repeat the same draws with the same N.", min=0)
    stop: list[str] | None = setting(None, "End the answer before this text; repeatable.")
    json_schema: str | None = setting(
        None,
        "Constrain the answer to the JSON schema in this file. - reads stdin; a text in "
        "braces is the schema itself.",
        metavar="FILE",
    )
    regex: str | None = setting(None, "Constrain the answer to this regular expression.")
    template_option: list[str] | None = setting(
        None,
        "Set an option of the chat template, with a VALUE in JSON or a text, such as "
        "enable_thinking=false. chat_template=NAME takes one of several templates; "
        "repeatable.",
        metavar="KEY=VALUE",
    )
    logprobs: int | None = _number(
        "logprobs",
        "With --json, print how likely each token was, and the N likeliest in its place.",
        panel="Output",
    )

    def given(self) -> dict[str, Any]:
        """Return the settings that were given, named as `Session.set_generation` takes them.

        Raises:
            ValueError: there is no JSON schema where one was said to be, or an option of the chat
                template has no value.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.json_schema is not None:
            values["json_schema"] = read_schema(self.json_schema)
        values["stop_strings"] = values.pop("stop") or None
        values["template_options"] = template_options(values.pop("template_option") or []) or None
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def parse(cls, name: str, text: str) -> Sampling:
        """Read one setting from text, within its bounds.

        Raises:
            ValueError: it is no number, or out of bounds.
        """
        if name == "stop":
            return cls(stop=[text])
        if name == "template_option":
            return cls(template_option=[text])
        if name == "json_schema":
            return cls(json_schema=text)
        if name == "regex":
            return cls(regex=text)
        bounds = NUMBERS[name]
        try:
            value = bounds.kind(text)
        except ValueError:
            value = text
        if not bounds.holds(value):
            raise ValueError(f"{name} takes {bounds}; got {text!r}")
        return cls(**{name: value})


@dataclass(frozen=True)
class Output:
    """A group of options that say what is printed."""

    heading: ClassVar = "Output"

    json: bool = again(JSON)
    quiet: bool = setting(
        False, "Print nothing on stderr but warnings and errors.", "--quiet", "-q"
    )


@dataclass(frozen=True)
class Run:
    """A record of a model, and of all options that say how it runs."""

    model: str
    backend: Backend = Backend()
    budget: Budget = Budget()
    running: Running = Running()
    output: Output = Output()
