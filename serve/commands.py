"""Defines the command serve: its options, and a server from its start to its end.

`kvcap --help` imports this, so what is slow to import is imported when the command runs.
"""

from __future__ import annotations

import os
import re
import signal
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcap.runtime.cli.console import complain, say
from kvcap.runtime.cli.options import (
    Backend,
    Budget,
    ChatTemplate,
    Device,
    Model,
    Output,
    Recalling,
    Running,
    Sampling,
    SharedPrompts,
    Threads,
    grouped,
    option,
)
from kvcap.runtime.errors import ExtraMissing, how_to_install
from kvcap.runtime.files import as_text
from kvcap.runtime.models.names import REPOSITORY
from kvcap.runtime.planning.serving import usual_body
from kvcap.runtime.types import POCKET
from kvcap.runtime.units import parse_bytes

if TYPE_CHECKING:  # needs packages of the extra `serve`
    from kvcap.serve.server import Server

HOST_NAME = re.compile(r"\[[0-9a-fA-F:.]+\]|[^:/\[\]\s]+")
ORIGIN = re.compile(r"\*|[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s?#]+")
ADVICE = "--host {host} lets other machines in; give --api-key, or say --insecure to let in anybody"


@dataclass(frozen=True)
class Address:
    """A group of options that say where the server is found, and by whom."""

    heading: ClassVar = "Address"

    host: Annotated[
        str,
        option(
            "--host",
            metavar="ADDRESS",
            help="Listen on this address of the machine.",
            show_default=True,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        option(
            "--port",
            min=0,
            max=65535,
            help="Listen on this port; 0 takes a free one.",
            show_default=True,
        ),
    ] = 8000
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            metavar="KEY",
            help="Let in only who has this key; repeatable, and no key sees another's "
            "conversations. Other users of the machine see the command line: "
            "KVCAP_API_KEY or a file is better.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option(
            "--api-key-file", metavar="FILE", help="Read keys from this file, one in each line."
        ),
    ] = None
    insecure: Annotated[bool, option("--insecure", help="Let in anybody who reaches --host.")] = (
        False
    )
    allow_host: Annotated[
        list[str] | None,
        option(
            "--allow-host",
            metavar="NAME",
            help="Answer requests that reach the server by this name, too, such as "
            "host.docker.internal; repeatable. Beside --host 0.0.0.0, other names are "
            "refused.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        option(
            "--cors-origin",
            metavar="URL",
            help="Let pages of this site, such as https://chat.example.org, ask through a "
            "browser; * is every site; repeatable.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        option("--tls-cert", metavar="FILE", help="Speak HTTPS, with this certificate (PEM)."),
    ] = None
    tls_key: Annotated[
        Path | None, option("--tls-key", metavar="FILE", help="Use this key (PEM) with --tls-cert.")
    ] = None
    name: Annotated[
        str | None,
        option(
            "--name",
            metavar="NAME",
            help="Let clients call the model by this name (MODEL by default).",
        ),
    ] = None

    def hosts(self) -> list[str] | None:
        """Return the names by which requests may reach the server; None: any.

        Raises:
            ValueError: one is no name of a host.
        """
        from kvcap.serve.app import LOOPBACK
        from kvcap.serve.server import is_loopback

        names = self.allow_host or []
        for name in names:
            if not HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"--allow-host {name!r} is no name of a host; give one without "
                    "scheme and port, such as host.docker.internal"
                )
        if not names and not is_loopback(self.host):
            return None
        return [*LOOPBACK, self.host, *names]

    def origins(self) -> list[str]:
        """Return the sites whose pages may ask.

        Raises:
            ValueError: one is no origin.
        """
        for origin in self.cors_origin or []:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--cors-origin {origin!r} is no origin of a page; give its scheme, host and "
                    "port, such as https://chat.example.org, or *"
                )
        return self.cors_origin or []

    def tls(self) -> tuple[Path, Path] | None:
        """Return the files of certificate and key; None: the server speaks HTTP.

        Raises:
            ValueError: only one was given, or they cannot be used.
        """
        if self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise ValueError("--tls-cert and --tls-key go together; give both, or none")
        try:
            ssl.create_default_context().load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:
            raise ValueError(
                f"--tls-cert {self.tls_cert} and --tls-key {self.tls_key} cannot be used "
                f"({error.strerror or error}); give a certificate and its key in PEM"
            ) from error
        return self.tls_cert, self.tls_key

    def keys(self) -> list[str]:
        """Return all keys.

        Raises:
            ValueError: a key that no client could send, a file that cannot be read, or none where
                other machines are let in.
        """
        from kvcap.serve.server import is_loopback

        found = list(self.api_key or ())
        if self.api_key_file is not None:
            try:
                data = self.api_key_file.read_bytes()
            except OSError as error:
                raise ValueError(
                    f"cannot read --api-key-file {self.api_key_file}: {error.strerror}"
                ) from error
            lines = as_text(data, repr(str(self.api_key_file))).splitlines()
            found += [line.strip() for line in lines if line.strip()]
            if not found:
                raise ValueError(f"there is no key in {self.api_key_file}; give one in each line")
        for number, key in enumerate(found, 1):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"API key {number} is empty or has a space or a letter beyond "
                    "ASCII; use letters, digits and dashes"
                )
        if not found and not self.insecure and not is_loopback(self.host):
            raise ValueError(ADVICE.format(host=self.host))
        return found


@dataclass(frozen=True)
class Load:
    """A group of options that say how much the server takes on."""

    heading: ClassVar = "Limits"

    max_together: Annotated[
        int | None,
        option(
            "--max-together",
            min=1,
            metavar="N",
            help="Write at most N answers at once (by default as many as fit, up to 8).",
        ),
    ] = None
    max_conversations: Annotated[
        int | None,
        option(
            "--max-conversations",
            min=1,
            metavar="N",
            help="Hold at most N conversations in memory (by default as many as fit into "
            "--memory-cap, or 64).",
        ),
    ] = None
    shared_prompts: SharedPrompts = None
    max_queue: Annotated[
        int,
        option(
            "--max-queue",
            min=0,
            metavar="N",
            help="Let at most N requests wait; further ones are answered with 429.",
            show_default=True,
        ),
    ] = 64
    max_body: Annotated[
        str | None,
        option(
            "--max-body",
            metavar="BYTES",
            help="Refuse requests of more bytes (4MiB; 256KiB with --memory-cap, which keeps "
            "free what reading them takes).",
        ),
    ] = None
    max_messages: Annotated[
        int,
        option(
            "--max-messages",
            min=1,
            metavar="N",
            help="Refuse requests of more than N messages.",
            show_default=True,
        ),
    ] = 4096
    max_answer_tokens: Annotated[
        int,
        option(
            "--max-answer-tokens",
            min=1,
            metavar="N",
            help="Refuse requests for answers of more than N tokens.",
            show_default=True,
        ),
    ] = 32768
    max_connections: Annotated[
        int,
        option(
            "--max-connections",
            min=1,
            metavar="N",
            help="Serve at most N connections at once.",
            show_default=True,
        ),
    ] = 256
    grace: Annotated[
        float,
        option(
            "--grace",
            min=0,
            metavar="SECONDS",
            help="Let answers go on for so long once the server has to end (SIGTERM); then "
            "they end with an error, within 3 seconds more.",
            show_default=True,
        ),
    ] = 5.0
    keep: Annotated[
        Path | None,
        option(
            "--keep",
            metavar="DIR",
            help="Save idle conversations in this folder and continue them later, also after a "
            "restart. Without it, those that have no place in memory are read again.",
        ),
    ] = None
    keep_cap: Annotated[
        str,
        option(
            "--keep-cap",
            metavar="BYTES",
            help="Limit the size of all files in --keep.",
            show_default=True,
        ),
    ] = "4GiB"


@dataclass(frozen=True)
class EngineOptions:
    """A group of options that say which processes answer."""

    heading: ClassVar = "Replicas"

    engine: Annotated[
        Literal["local", "ray"],
        option(
            "--engine",
            help="Answer in this process, or in replicas of the model by Ray Serve. All "
            "options are of each replica, but those of the address, --max-connections and "
            "--keep.",
            show_default=True,
        ),
    ] = "local"
    replicas: Annotated[
        int | None,
        option(
            "--replicas",
            min=1,
            metavar="N",
            help="With --engine ray, run N replicas on a GPU or some CPUs each (by default one "
            "per GPU, or machine).",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        option(
            "--ray-address",
            metavar="ADDRESS",
            help="With --engine ray, join the cluster at this address (by default one is "
            "started here).",
        ),
    ] = None

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: naming the option.
        """
        if self.engine == "local":
            for name, given in (("--replicas", self.replicas), ("--ray-address", self.ray_address)):
                if given is not None:
                    raise ValueError(
                        f"{name} {given} needs --engine ray; add that, or leave it out"
                    )


@grouped
def serve_command(
    model: Model = POCKET,
    *,
    address: Address,
    load: Load,
    engine: EngineOptions,
    backend: Backend,
    budget: Budget,
    device: Device = None,
    threads: Threads = None,
    evict_every: Annotated[
        int | None,
        option(
            "--evict-every",
            min=1,
            metavar="N",
            panel="Memory",
            help="While answering, evict every N tokens (64 on a CPU; 1 on a GPU, where "
            "conversations are answered by turns with more).",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    sampling: Sampling,
    recalling: Recalling,
    quiet: Annotated[
        bool,
        option(
            "--quiet", "-q", panel="Output", help="Print nothing on stderr but warnings and errors."
        ),
    ] = False,
) -> None:
    """Serve a model over OpenAI's API, with a fixed amount of KV memory for every conversation.

    --memory-cap is of the whole process: as many conversations as fit are taken on at once, others
    wait, and what waits is bounded too. Sampling options and --recall hold where a request says
    nothing.

    \b
    kvcap serve
    kvcap serve Qwen/Qwen3-0.6B --budget-tokens 1024 --memory-cap 8GiB
    KVCAP_API_KEY=... kvcap serve --host 0.0.0.0
    """  # noqa: D301  # \\b: lines of the help that are not joined
    running = Running(
        device=device, threads=threads, evict_every=evict_every, chat_template=chat_template
    )
    server = opened(
        model,
        address,
        load,
        engine,
        backend,
        budget,
        running,
        sampling,
        Output(quiet=quiet),
        recalling,
    )
    # uvicorn handles SIGTERM, and raises it again once all is saved: then the exit code is 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        if server.forced and engine.engine == "local":
            say("the server has ended at once, at a second signal; unfinished answers are lost")
            os._exit(1)  # threads that save or answer are not waited for
    if not quiet:
        say("the server has ended")


def opened(
    model: str,
    address: Address,
    load: Load,
    engine: EngineOptions,
    backend: Backend,
    budget: Budget,
    running: Running,
    sampling: Sampling,
    output: Output,
    recalling: Recalling,
) -> Server:
    """Make a server that has its address and its model, and is yet to run.

    Raises:
        ExtraMissing: the packages that serve are not installed.
        PortTaken: it cannot listen there; found before the model is loaded.
        ValueError: options that do not go together.
        KvcapError: the model cannot be loaded, or not even one conversation fits.
    """
    try:
        from kvcap.serve.admission import open_conversations
        from kvcap.serve.app import Settings, application
        from kvcap.serve.errors import NO_TEMPLATE
        from kvcap.serve.limits import RequestLimits
        from kvcap.serve.page_routes import OPEN_PATHS, page_routes
        from kvcap.serve.server import Server, bound
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvcap":
            raise
        raise ExtraMissing(
            f"serving needs {error.name}, which is not installed; {how_to_install('serve')}"
        ) from error
    usual = usual_body(budget.memory_cap)
    limits = RequestLimits(
        body_bytes=usual if load.max_body is None else parse_bytes(load.max_body),
        messages=load.max_messages,
        answer_tokens=load.max_answer_tokens,
        connections=load.max_connections,
    )
    settings = Settings(
        address.name or _name(model),
        limits,
        address.keys(),
        address.hosts(),
        sampling.given(),
        OPEN_PATHS,
        address.origins(),
    )
    tls = address.tls()
    engine.check()
    recall = recalling.served()
    listening = bound(address.host, address.port)
    taken_on: Any = {
        "together": load.max_together,
        "places": load.max_conversations,
        "waiting": load.max_queue,
        "body": limits.body_bytes,
        "folder": load.keep,
        "disk_cap": load.keep_cap,
        "recall": recall,
        "shared_prompts": load.shared_prompts,
    }
    try:
        if engine.engine == "ray":
            from kvcap.serve.replicas import Opening, open_replicas

            found: Any = open_replicas(
                Opening(model, backend, budget, running, taken_on),
                settings.model,
                engine.replicas,
                engine.ray_address,
                limits.connections,
            )
            conversations, summary = found, found.summary
        else:
            found = open_conversations(model, backend, budget, running, output, **taken_on)
            conversations, summary = found.scheduler, found.plan.summary
        app = application(conversations, settings, page_routes())
        server = Server(app, listening, limits, load.grace, tls)
    except BaseException:
        listening.close()
        raise
    if not output.quiet:
        where = f"{server.url}/v1, with a chat page at {server.url}/"
        say(("serving", "bold"), f" {settings.model} at {where} · {summary}")
    if not conversations.figures().chat_template:
        complain(f"warning: {settings.model} {NO_TEMPLATE}")
    return server


def _name(model: str) -> str:
    """Return what clients call a model by: its repository, or the last part of its path."""
    return model if REPOSITORY.fullmatch(model) else Path(model).resolve().name
