"""Defines the commands chat, generate, plan, warm and policies, and loads models by their options.

`kvcap --help` imports this, so what is slow to import is imported when a command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from kvcap import dtypes
from kvcap.runtime.cli.console import INFEASIBLE, complain, styled, visible
from kvcap.runtime.cli.declare import argument, option
from kvcap.runtime.cli.gguf import (
    USUAL_PLACES,
    answers_of_gguf,
    library_of,
    load_gguf,
    planned_gguf,
)
from kvcap.runtime.cli.importing import large_imports
from kvcap.runtime.cli.options import (
    DEVICE,
    EVICT_EVERY,
    JSON,
    MODEL,
    SHARED_PROMPTS,
    STDIN,
    Backend,
    Budget,
    Output,
    Recalling,
    Run,
    Running,
    Sampling,
    pairs,
    policy_names,
)
from kvcap.runtime.errors import NotExportable, PlanInfeasible, UnsupportedModel
from kvcap.runtime.files import as_text
from kvcap.runtime.memory.free_memory import free_memory, process_bytes
from kvcap.runtime.models.gguf import GgufFile, is_gguf, read_gguf
from kvcap.runtime.models.hub import CONFIG, REPOSITORY
from kvcap.runtime.models.names import check_here, is_name, locate, resolve
from kvcap.runtime.planning.plan import (
    AUTO,
    LOADING,
    MemoryPlan,
    Sizes,
    parse_cap,
    warn_if_short,
)
from kvcap.runtime.planning.serving import ServerSizes, ServingPlan, Shared
from kvcap.runtime.recall.settings import DEFAULT, RecallSettings
from kvcap.runtime.types import BUILT_IN, FULL, MANIFEST, POCKET, ModelKind

if TYPE_CHECKING:  # NumPy, tokenizers and more stand behind these
    from typing_extensions import Unpack

    from kvcap.runtime.backends.onnxruntime.manifest import Manifest
    from kvcap.runtime.backends.onnxruntime.runtime import PolicyRequest
    from kvcap.runtime.session.ends import End
    from kvcap.runtime.session.engine import Engine
    from kvcap.runtime.session.session import Session


def chat_command(
    model: str = MODEL,
    no_commands: bool = option(
        False, "Take every line as a message, even one that begins with a slash."
    ),
    *,
    backend: Backend,
    budget: Budget,
    running: Running,
    recalling: Recalling,
    sampling: Sampling,
    output: Output,
) -> None:
    """Chat with a model in a fixed amount of KV memory.

    On a terminal, /help lists the commands, Alt+Enter or a final backslash starts a new line,
    Ctrl-C stops an answer. Without a terminal every line of stdin, in UTF-8, is a turn, and stdout
    has nothing but the answers. A command is a slash and a word; other lines are messages.
    """
    from kvcap.runtime.cli.chat import Chat
    from kvcap.runtime.session.messages import ChatWriter
    from kvcap.runtime.session.settings import template_options

    if sampling.json_schema == STDIN:
        raise ValueError("stdin is the conversation; give --json-schema a file")
    check_logprobs(sampling, output)
    recall = recalling.settings(budget.memory_cap)
    runtime = load_for_chat(Run(model, backend, budget, running, output), recall.nbytes)
    session = start_session(runtime, running, sampling, recall)
    hello, options = {"role": "user", "content": "Hello!"}, template_options(session.generation)
    ChatWriter(runtime.tokenizer, (), options).render_turn(None, [hello])  # can it chat?
    save_at_start(session, running.session)
    chat = Chat(session, output, running.session, commands=not no_commands)
    if sys.stdin.isatty() and styled():
        from kvcap.runtime.cli.terminal import converse

        code = converse(chat)
    else:
        chat.show_resumed()
        if isinstance(sys.stdin, TextIOWrapper):  # bytes of another code are refused by the line
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        code = chat.run_script(sys.stdin)
    chat.save()
    raise Exit(code)


def generate_command(
    first: str | None = argument(
        None, "Run this model; needed only before a PROMPT or -f.", metavar="MODEL"
    ),
    second: str | None = argument(None, "Answer this text; - reads stdin.", metavar="PROMPT"),
    file: str | None = option(
        None, "Read the prompt from a file; - reads stdin.", "--file", "-f", metavar="FILE"
    ),
    model: str = option(
        POCKET,
        "Run this model, where no MODEL is given.",
        "--model",
        "-m",
        metavar="MODEL",
        panel="Model",
        env=True,
    ),
    raw: bool = option(
        False,
        "Continue the prompt without the chat template. Evicted text is read again in "
        "it only with --recall N.",
    ),
    *,
    backend: Backend,
    budget: Budget,
    running: Running,
    recalling: Recalling,
    sampling: Sampling,
    output: Output,
) -> None:
    """Answer one prompt and print the answer.

    A single argument is the prompt; with two, the first is the model; with -f, the only one is.
    What is piped into stdin is the prompt where no other is given.

    \b
    kvcap generate "Hello!"
    kvcap generate Qwen/Qwen3-0.6B "Hello!" --kv-budget 64MiB
    kvcap generate -f long.txt --json
    git log -5 | kvcap generate -m Qwen/Qwen3-0.6B
    """  # noqa: D301  # \\b: lines of the help that are not joined
    from kvcap.runtime.cli.answer import print_answer

    prompt, model = prompt_and_model(first, second, file, model)
    if raw and running.system_prompt is not None:
        raise ValueError("--system-prompt needs the chat template; leave --raw out")
    if raw and sampling.template_option:
        raise ValueError("--template-option is of the chat template; leave --raw out")
    if raw and running.chat_template is not None:
        raise ValueError("--chat-template writes messages; leave --raw out")
    if not prompt.strip():
        raise ValueError("the prompt is empty; give at least one word")
    check_logprobs(sampling, output)
    recall = recalling.settings(budget.memory_cap)
    runtime = load_for_chat(Run(model, backend, budget, running, output), recall.nbytes)
    session = start_session(runtime, running, sampling, recall)
    save_at_start(session, running.session)

    def say() -> Iterator[str]:
        if raw:  # a text that is to be read as it is: nothing is put into it unasked
            return session.complete(prompt, recall=bool(recall.tokens))
        return session.send(prompt)

    code = print_answer(session, say, output)
    if running.session is not None:
        session.save(running.session)
    raise Exit(code)


def plan_command(
    model: str = MODEL,
    length: int | None = option(
        None,
        "Say what an uncapped cache would take for N tokens (as many as the model was "
        "trained on, by default).",
        "--context",
        min=1,
    ),
    *,
    serve: bool = option(
        False,
        "Say how many conversations a server holds at once under --memory-cap, or in "
        "the memory that is free.",
    ),
    shared_prompts: int | None = SHARED_PROMPTS,
    backend: Backend,
    budget: Budget,
    recalling: Recalling,
    json_: bool = JSON,
) -> None:
    """Predict what a run will hold in memory, from the config and the headers of the weights.

    Exits with 3 if no setting fits, and says which would.
    """
    from kvcap.runtime.cli.tables import print_plan

    if shared_prompts is not None and not serve:
        raise ValueError(
            f"--shared-prompts {shared_prompts} needs --serve; add that, or leave it out"
        )
    check_here(model)
    free, run = free_memory(), Run(model, backend, budget)
    serving = None
    recall = recalling.served() if serve else recalling.settings(budget.memory_cap)
    try:
        if serve:
            serving = planned_serving(run, recall=recall, shared_prompts=shared_prompts)
        plan = serving.one if serving else planned(run, recall.nbytes)
    except PlanInfeasible as error:
        if not json_:
            raise
        document = {"fits": False, "error": str(error), **error.least, "free_bytes": free.nbytes}
        print(json.dumps(document))
        complain(error)
        raise Exit(INFEASIBLE) from error
    tokens = length or plan.trained_length
    by_llamacpp = backend.by_llamacpp(model)
    stored = None if by_llamacpp or backend.exported(model) else _in_gguf(model)
    ends, drawing = planned_answers(model, backend)
    if by_llamacpp:
        evicts = plan.policy != FULL
    else:
        evicts = backend.exported(model) or budget.eviction().policy.evicts
    again = recall.limit(plan.budget_tokens) if evicts and recall.nbytes else 0
    if json_:
        uncapped = {"uncapped_tokens": tokens, "uncapped_bytes": plan.uncapped_bytes(tokens)}
        available = {"free_bytes": free.nbytes, "free_by": free.source}
        file = {} if stored is None else {"file_bytes": stored.nbytes, "file_type": stored.numbers}
        file |= {"library": library_of()} if by_llamacpp else {}
        server = {} if serving is None else {"serve": serving.as_dict()}
        answers: dict[str, Any] = {"end_tokens": [end._asdict() for end in ends]}
        answers |= {"drawn_by": drawing, "recall_tokens": again}
        print(json.dumps({**plan.as_dict(), **answers, **uncapped, **available, **file, **server}))
    else:
        library = library_of() if by_llamacpp else ""
        print_plan(model, plan, free, tokens, evicts=evicts, library=library)
        if again:
            print(
                f"recall: evicted text that a message asks about takes at most {again:,} of the "
                f"{plan.budget_tokens:,} slots until it is answered"
            )
        print(visible(f"answers end at {', '.join(map(str, ends)) or 'no token'}"))
        print(f"a chat draws by {drawing}")
        if serving is not None:
            print(f"a server: {serving.summary}")
        if stored is not None:
            print(f"weights: {stored.becomes(plan.weights, plan.weights_dtype or plan.dtype)}")
    warn_if_short(plan, free, budget.memory_cap)


def warm_command(
    model: str = MODEL,
    *,
    device: str | None = DEVICE,
    evict_every: int = EVICT_EVERY,
    budget: Budget,
) -> None:
    """Compile what a model's answers run on this GPU, so that the first need not wait for it.

    Loads the model and has a short conversation. What is compiled is kept in Triton's cache
    (TRITON_CACHE_DIR), where every process finds it; give the options that it will run with.
    """
    quiet_libraries()
    from kvcap.runtime.backends.pytorch.runtime import Runtime
    from kvcap.runtime.models.devices import best_device, usable

    begun, chosen = perf_counter(), usable(device) or best_device()
    if not str(chosen).startswith("cuda"):
        raise ValueError(
            f"kernels are compiled for a GPU of CUDA, and on {chosen} the model runs without them; "
            "use --device cuda where there is one"
        )
    runtime = Runtime.from_pretrained(
        model,
        budget.settings(policy=budget.eviction(), evict_every=evict_every),
        device=chosen,
        dtype=budget.dtype,
        memory_cap=budget.memory_cap,
    )
    seconds = perf_counter() - begun
    print(f"{runtime.plan.summary} is ready, after {seconds:.1f} s", file=sys.stderr)


def policies_command(
    context: click.Context,
    json_: bool = JSON,
) -> None:
    """List the eviction policies and what each costs."""
    if context.invoked_subcommand is not None:
        return
    from kvcap.runtime.cli.policy_files import read_list
    from kvcap.runtime.cli.tables import print_policies

    rows, others = read_list() or _imported_list()
    if json_:
        print(json.dumps({"policies": rows, "companions": others}))
    else:
        print_policies(rows, others)


def _imported_list() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of policies and companions from the policies themselves."""
    with large_imports():
        from kvcap.policies import load_policy, policies
    from kvcap.runtime.cli.tables import describe, describe_companions

    return [describe(name, load_policy(name)) for name in policies()], describe_companions()


def policy_command(
    context: click.Context,
    name: str = argument(..., "Show this policy, or A+B for a combination.", complete=policy_names),
    json_: bool = JSON,
) -> None:
    """One policy: when to use it, its formula, paper, options and costs; NAME alone will do."""
    from kvcap.runtime.cli.policy_files import read_list
    from kvcap.runtime.cli.tables import describe, print_policy

    listed, _ = read_list() or ([], [])
    row = next((row for row in listed if row["name"] == name), None)
    if row is None:  # a combination, or no policy's name
        with large_imports():
            from kvcap.policies import load_policy
        row = describe(name, load_policy(name))
    before = context.parent.params if context.parent is not None else {}
    if json_ or before.get("json_"):
        print(json.dumps(row))
    else:
        print_policy(row)


@large_imports()
def load(run: Run, recall_store: int | None = None) -> Engine:
    """Load a model under its budget, with a note on stderr meanwhile.

    Args:
        run: the model and its options.
        recall_store: bytes of the index of a conversation's text; None: as is usual.
    """
    model, backend, quiet = run.model, run.backend, run.output.quiet
    by_llamacpp = backend.by_llamacpp(model)
    exported = not by_llamacpp and backend.exported(model)
    if run.running.gpu_layers and not by_llamacpp:
        raise UnsupportedModel(
            "--gpu-layers is for GGUF files that llama.cpp's library runs; leave it out"
        )
    if exported and (weights := backend.weights) is not None:
        from kvcap.runtime.cli.kept_exports import kept_export

        made = kept_export(model, weights, run.budget, quiet, calibrate=backend.calibrate)
        run = replace(run, model=str(made))
    stored = None if exported or by_llamacpp or quiet else _in_gguf(model)
    note = not quiet and styled()
    if note:
        sys.stderr.write(f"\x1b[2mloading {run.model} ...\x1b[0m")
        sys.stderr.flush()
    loads = load_gguf if by_llamacpp else _load_export if exported else _load_model
    try:
        runtime: Engine = loads(run, recall_store)
    finally:
        if note:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
    if stored is not None:
        plan = runtime.plan
        becomes = stored.becomes(plan.weights, plan.weights_dtype or plan.dtype)
        print(f"{model}: {becomes}", file=sys.stderr)
    if (template := run.running.chat_template) is not None:
        from kvcap.runtime.session.named_templates import use_template

        use_template(runtime.tokenizer, template)
        vars(runtime).pop("generation", None)  # found anew, with the tokens that end an answer
    return runtime


def load_for_chat(run: Run, recall_store: int | None = None) -> Engine:
    """Load a model as `load` does; one that names no drawing draws mildly, by its kind."""
    runtime = load(run, recall_store)
    runtime.generation.update(**_mild(run.model, runtime.generation, runtime.kind))
    return runtime


def _mild(model: str, generation: Any, kind: ModelKind) -> dict[str, Any]:
    """Return the settings by which a chat draws mildly; none where the model names its own."""
    from kvcap.runtime.session.settings import mild_for, names_drawing

    return {} if model in BUILT_IN or names_drawing(generation) else mild_for(kind)


def _load_model(run: Run, recall_store: int | None) -> Engine:
    quiet_libraries()
    use_threads(run.running.threads)
    from kvcap.runtime.backends.pytorch.runtime import Runtime

    budget = run.budget
    return Runtime.from_pretrained(
        run.model,
        budget.settings(policy=budget.eviction(), evict_every=run.running.evict_every),
        memory_cap=budget.memory_cap,
        enforce=budget.enforce,
        dtype=budget.dtype,
        device=run.running.device,
        weights=run.backend.weights,
        recall_store=recall_store,
    )


def _in_gguf(model: str) -> GgufFile | None:
    """Return the header of the GGUF file `model`; None where it is no such file."""
    path = None if model in BUILT_IN else locate(model)
    return read_gguf(str(path)) if path is not None and path.is_file() else None


def _load_export(run: Run, recall_store: int | None) -> Engine:
    """Load an exported decoder.

    Raises:
        NotExportable: an option that its backend does not have.
    """
    from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime

    budget, running = run.budget, run.running
    if running.device not in (None, "cpu"):
        raise NotExportable(
            "--device is not for --backend onnxruntime: this backend runs on the CPU; leave it out"
        )
    return OrtRuntime.from_directory(
        _export_folder(run.model),
        _policy_request(budget),
        budget.settings(evict_every=running.evict_every),
        memory_cap=budget.memory_cap,
        enforce=budget.enforce,
        dtype=budget.dtype,
        threads=running.threads,
        recall_store=recall_store,
    )


@large_imports()
def planned(run: Run, recall_store: int = 0, *, export: bool = False) -> MemoryPlan:
    """Plan a run, without reading weights.

    Args:
        run: the model and its options.
        recall_store: bytes of the index of a conversation's text.
        export: make an export that is missing, so that its bytes are known, and not estimated.

    Raises:
        PlanInfeasible: nothing fits, naming what would.
    """
    model, backend, budget = run.model, run.backend, run.budget
    if backend.by_llamacpp(model):
        return planned_gguf(model, budget, recall_store)
    if backend.exported(model):
        return _planned_export(_manifest(run, export), budget, recall_store)
    quiet_libraries()
    from kvcap.runtime.models.devices import best_device, usable
    from kvcap.runtime.models.files import load_config
    from kvcap.runtime.models.weights import read_headers

    wanted = usable(run.running.device)
    chosen = wanted or (best_device() if backend.weights is None else "cpu")
    where, settings = resolve(model), budget.settings(policy=budget.eviction())
    config = Sizes(settings, budget.memory_cap).config_for(load_config(where))
    return MemoryPlan.of(
        config,
        settings,
        dtype=dtypes.parse(budget.dtype),
        device=chosen,
        memory_cap=budget.memory_cap,
        headers=read_headers(where),
        rehearse=True,
        weights=backend.weights,
        recall_store=recall_store,
    )


def planned_answers(model: str, backend: Backend) -> tuple[list[End], str]:
    """Return the tokens that end an answer, and how its tokens are drawn, in words.

    The ends of a missing tokenizer are not known.

    Raises:
        ModelFilesBroken: settings of generation or the tokenizer cannot be used.
    """
    from kvcap.runtime.session.ends import ends_of

    if backend.by_llamacpp(model):
        ends, generation, kind = answers_of_gguf(model)
        return ends, _drawing(model, generation, kind)
    if backend.exported(model) and backend.kept(model) is None:
        from kvcap.runtime.backends.onnxruntime import manifest
        from kvcap.runtime.backends.onnxruntime.runtime import generation_of
        from kvcap.runtime.backends.onnxruntime.tokenizer import Tokenizer

        export = manifest.read(_export_folder(model))
        generation = generation_of(export)
        ends = ends_of(Tokenizer(export.folder, export.listed), generation)
        return ends, _drawing(model, generation, export.kind)
    from kvcap.runtime.models.files import find_tokenizer, load_config, load_generation

    where = resolve(model)
    config = load_config(where)
    generation = load_generation(where, config)
    ends = ends_of(find_tokenizer(where), generation, config)
    return ends, _drawing(model, generation, ModelKind(config.model_type, config.hidden_size))


def _drawing(model: str, generation: Any, kind: ModelKind) -> str:
    """Return how a chat draws tokens: by the model's own settings, or else by mild ones."""
    from kvcap.runtime.session.settings import drawn

    mild = _mild(model, generation, kind)
    settings = mild or drawn(generation)
    settings.pop("do_sample", None)
    listed = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    return (
        f"{listed} ({'it names none; --temperature 0 takes the likeliest' if mild else 'its own'})"
    )


def planned_serving(
    run: Run,
    *,
    starts: bool = False,
    recall: RecallSettings = DEFAULT,
    **sizes: Unpack[ServerSizes],
) -> ServingPlan:
    """Return the plan of a server, without reading weights.

    Args:
        run: the model and its options; `memory_cap` is the whole process's, all else is of each
            conversation.
        starts: the server is about to start: an export that is missing is made, and without a
            `memory_cap` there is no cap; otherwise what is free is the cap.
        recall: how large the index of a conversation's text may be.
        sizes: as for `ServingPlan.of`.

    Raises:
        PlanInfeasible: not even one fits, or fewer than `together` and `places` ask for.
    """
    model, backend, running = run.model, run.backend, run.running
    given = run.budget.memory_cap or (None if starts else AUTO)
    cap = None if given is None else parse_cap(given)
    budget = replace(run.budget, memory_cap=None)
    one = planned(replace(run, budget=budget), export=starts)
    one = replace(one, baseline=process_bytes() + LOADING)
    if backend.by_llamacpp(model) and sizes.get("places") is None and cap is None:
        sizes["places"] = USUAL_PLACES
    if backend.by_llamacpp(model) or backend.exported(model):

        def shared(number: int) -> Shared:
            return Shared()

    else:
        from kvcap.runtime.backends.pytorch.batch import plan_shared
        from kvcap.runtime.backends.pytorch.runtime import usual_every
        from kvcap.runtime.models.devices import best_device, usable
        from kvcap.runtime.models.files import load_config

        device = usable(running.device) or (best_device() if backend.weights is None else "cpu")
        every = running.evict_every or usual_every(device, one.block_size)
        settings = run.budget.settings(policy=budget.eviction(), evict_every=every)
        reach = Sizes(settings, run.budget.memory_cap)
        config = reach.config_for(load_config(resolve(model)))

        def shared(number: int) -> Shared:
            return plan_shared(config, settings, one, number, device=device)

    return ServingPlan.of(one, shared, cap=cap, index=recall.nbytes, **sizes)


def _manifest(run: Run, export: bool) -> Manifest:
    """Return the manifest of the export that would run, whether it is made or not."""
    from kvcap.runtime.backends.onnxruntime import manifest
    from kvcap.runtime.cli.kept_exports import foreseen_export, kept_export

    model, budget, calibrate = run.model, run.budget, run.backend.calibrate
    if (weights := run.backend.kept(model)) is None:
        return manifest.read(_export_folder(model))
    if export:
        return manifest.read(kept_export(model, weights, budget, calibrate=calibrate))
    return foreseen_export(model, weights, budget, calibrate)


def _planned_export(manifest: Manifest, budget: Budget, recall_store: int) -> MemoryPlan:
    from kvcap.runtime.backends.onnxruntime.plan import plan_of
    from kvcap.runtime.backends.onnxruntime.runtime import check_dtype, check_policy, check_slots

    check_policy(manifest, _policy_request(budget), budget.positions)
    check_dtype(manifest, budget.dtype)
    check_slots(manifest, budget.kv_dtype)
    sizes = Sizes(budget.settings(), budget.memory_cap)
    return plan_of(manifest, sizes, recall_store=recall_store)


def _policy_request(budget: Budget) -> PolicyRequest:
    from kvcap.runtime.backends.onnxruntime.runtime import PolicyRequest

    options = pairs(budget.policy_option or [])
    return PolicyRequest(budget.policy, options, **budget.pins)


def _export_folder(model: str) -> Path:
    """Return the directory of an exported decoder.

    Raises:
        ModelNotFound: there is nothing of that name.
        NotExportable: a model that was not exported yet.
    """
    folder = Path(model) if model in BUILT_IN else locate(model)
    if folder is not None and folder.is_file():
        raise NotExportable(
            f"{model!r} is a GGUF file, which llama.cpp's library runs by default; leave --backend "
            "onnxruntime out, or add --weights int8 or int4 to have its weights rounded"
        )
    if folder is None or (model in BUILT_IN and not folder.is_dir()):
        what = "a built-in model" if model in BUILT_IN else "no directory"
        raise NotExportable(
            f"{model!r} is {what}, and --backend onnxruntime runs exported directories; export it "
            f"once with: kvcap export decoder {model} -o {Path(model).name}-onnx, and give that "
            "directory, or leave --backend onnxruntime out"
        )
    return folder


def start_session(
    runtime: Engine, running: Running, sampling: Sampling, recall: RecallSettings
) -> Session:
    """Return the conversation with the given settings, from its file where there is one.

    Raises:
        ValueError: the file's conversation has another system prompt, or there is none to pin.
    """
    given, system = sampling.given(), running.system_prompt
    file = running.session
    if file is not None and Path(file).exists():
        session: Session = runtime.session()
        session.restore(file)
        if system not in (None, session.system):
            raise ValueError(
                f"the conversation in {file!r} has another system prompt; leave --system-prompt "
                "out, or change it in the chat with /system"
            )
    else:
        session = runtime.session(system, seed=given.pop("seed", None))
    if running.pin_system and not session.system:
        raise ValueError("--pin-system needs a system prompt; give one with --system-prompt")
    session.pin_system = session.pin_system or running.pin_system
    session.on_full = running.on_full
    session.recall.set(recall)
    if given:
        session.set_generation(**given)
    return session


def save_at_start(session: Session, file: str | None) -> None:
    """Save a conversation, so that a file that cannot be written is noticed before an answer."""
    if file is not None:
        session.save(file)


def check_logprobs(sampling: Sampling, output: Output) -> None:
    """Refuse log probabilities that would not be printed."""
    if sampling.logprobs is not None and not output.json:
        raise ValueError("--logprobs is printed in the document of --json; add that")


def prompt_and_model(
    first: str | None, second: str | None, file: str | None, model: str
) -> tuple[str, str]:
    """Return the prompt and the model, from the arguments of `generate`.

    What is piped into stdin is the prompt where no other is given.

    Raises:
        ValueError: too many or too few of them.
    """
    if file is not None:
        if second is not None:
            raise ValueError("give the prompt as an argument or with -f, not both")
        return read_input(file), first or model
    if second is not None:
        return read_input(STDIN) if second == STDIN else second, first or model
    named = first is not None and _names_model(first)
    if first is not None and not named:
        return read_input(STDIN) if first == STDIN else first, model
    if sys.stdin is None or sys.stdin.isatty():
        what = f"{first!r} is a model; add what it is to answer" if named else "give one"
        raise ValueError(f"no prompt: {what} as an argument, with -f FILE, or through stdin")
    return read_input(STDIN), first or model


def _names_model(text: str) -> bool:
    """Return whether the only argument of `generate` names a model, and is no prompt."""
    folder = Path(text)
    if is_name(text) or any((folder / name).is_file() for name in (CONFIG, MANIFEST)):
        return True
    if text.endswith(".gguf") and is_gguf(text):
        return True
    return REPOSITORY.fullmatch(text) is not None  # such a text is a repository of the hub


def read_input(file: str) -> str:
    """Return the text of a file, or of stdin for '-', without the newline that ends it.

    Raises:
        ValueError: no such file, not readable, or not UTF-8 text.
    """
    name = "stdin" if file == STDIN else repr(file)
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error
    return as_text(data, name)


def use_threads(count: int | None) -> None:
    """Make PyTorch compute with so many threads; with None, leave its own number."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def quiet_libraries() -> None:
    """Keep transformers' progress bars and advice off the screen, but not those of downloads."""
    import torch  # noqa: F401
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    downloads = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # the hub's too
    if downloads:
        enable_progress_bars()
