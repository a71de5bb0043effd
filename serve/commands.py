"""Defines the command serve: its options, and a server from its start to its end.

`kvcap --help` imports this, so what is slow to import is imported when the command runs.
"""

from __future__ import annotations

import os
import re
import signal
import ssl
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcap.runtime.cli.console import complain, say
from kvcap.runtime.cli.declare import again, setting
from kvcap.runtime.cli.options import (
    CHAT_TEMPLATE,
    DEVICE,
    MODEL,
    SHARED_PROMPTS,
    THREADS,
    Backend,
    Budget,
    Output,
    Recalling,
    Run,
    Running,
    Sampling,
)
from kvcap.runtime.errors import ExtraMissing, how_to_install
from kvcap.runtime.files import as_text
from kvcap.runtime.models.hub import REPOSITORY
from kvcap.runtime.planning.serving import usual_body
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

    host: str = setting(
        "127.0.0.1", "Listen on this address of the machine.", metavar="ADDRESS", show=True
    )
    port: int = setting(
        8000, "Listen on this port; 0 takes a free one.", min=0, max=65535, show=True
    )
    api_key: list[str] | None = setting(
        None,
        "Let in only who has this key; repeatable, and no key sees another's "
        "conversations. Other users of the machine see the command line: "
        "KVCAP_API_KEY or a file is better.",
        metavar="KEY",
    )
    api_key_file: Path | None = setting(
        None, "Read keys from this file, one in each line.", metavar="FILE"
    )
    insecure: bool = setting(False, "Let in anybody who reaches --host.")
    allow_host: list[str] | None = setting(
        None,
        "Answer requests that reach the server by this name, too, such as "
        "host.docker.internal; repeatable. Beside --host 0.0.0.0, other names are "
        "refused.",
        metavar="NAME",
    )
    cors_origin: list[str] | None = setting(
        None,
        "Let pages of this site, such as https://chat.example.org, ask through a "
        "browser; * is every site; repeatable.",
        metavar="URL",
    )
    tls_cert: Path | None = setting(
        None, "Speak HTTPS, with this certificate (PEM).", metavar="FILE"
    )
    tls_key: Path | None = setting(None, "Use this key (PEM) with --tls-cert.", metavar="FILE")
    name: str | None = setting(
        None, "Let clients call the model by this name (MODEL by default).", metavar="NAME"
    )

    def hosts(self) -> list[str] | None:
        """Return the names by which requests may reach the server; None: any.

        Raises:
            ValueError: one is no name of a host.
        """
        from kvcap.serve.chat_path import LOOPBACK
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

        keys = list(self.api_key or ())
        if self.api_key_file is not None:
            try:
                data = self.api_key_file.read_bytes()
            except OSError as error:
                raise ValueError(
                    f"cannot read --api-key-file {self.api_key_file}: {error.strerror}"
                ) from error
            lines = as_text(data, repr(str(self.api_key_file))).splitlines()
            keys += [line.strip() for line in lines if line.strip()]
            if not keys:
                raise ValueError(f"there is no key in {self.api_key_file}; give one in each line")
        for number, key in enumerate(keys, 1):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"API key {number} is empty or has a space or a letter beyond "
                    "ASCII; use letters, digits and dashes"
                )
        if not keys and not self.insecure and not is_loopback(self.host):
            raise ValueError(ADVICE.format(host=self.host))
        return keys


@dataclass(frozen=True)
class Load:
    """A group of options that say how much the server takes on."""

    heading: ClassVar = "Limits"

    max_together: int | None = setting(
        None, "Write at most N answers at once (by default as many as fit, up to 8).", min=1
    )
    max_conversations: int | None = setting(
        None,
        "Hold at most N conversations in memory (by default as many as fit into "
        "--memory-cap, or 64).",
        min=1,
    )
    shared_prompts: int | None = again(SHARED_PROMPTS)
    max_queue: int = setting(
        64, "Let at most N requests wait; further ones are answered with 429.", min=1, show=True
    )
    max_body: str | None = setting(
        None,
        "Refuse requests of more bytes (4MiB; 256KiB with --memory-cap, which keeps "
        "free what reading them takes).",
        metavar="BYTES",
    )
    max_messages: int = setting(4096, "Refuse requests of more than N messages.", min=1, show=True)
    max_answer_tokens: int = setting(
        32768, "Refuse requests for answers of more than N tokens.", min=1, show=True
    )
    max_connections: int = setting(256, "Serve at most N connections at once.", min=1, show=True)
    grace: float = setting(
        5.0,
        "Let answers go on for so long once the server has to end (SIGTERM); then "
        "they end with an error, within 3 seconds more.",
        min=0,
        metavar="SECONDS",
        show=True,
    )
    keep: Path | None = setting(
        None,
        "Save idle conversations in this folder and continue them later, also after a "
        "restart. Without it, those that have no place in memory are read again.",
        metavar="DIR",
    )
    keep_cap: str = setting(
        "4GiB", "Limit the size of all files in --keep.", metavar="BYTES", show=True
    )


@dataclass(frozen=True)
class EngineOptions:
    """A group of options that say which processes answer."""

    heading: ClassVar = "Replicas"

    engine: Literal["local", "ray"] = setting(
        "local",
        "Answer in this process, or in replicas of the model by Ray Serve. All "
        "options are of each replica, but those of the address, --max-connections and "
        "--keep.",
        show=True,
    )
    replicas: int | None = setting(
        None,
        "With --engine ray, run N replicas on a GPU or some CPUs each (by default one "
        "per GPU, or machine).",
        min=1,
    )
    ray_address: str | None = setting(
        None,
        "With --engine ray, join the cluster at this address (by default one is started here).",
        metavar="ADDRESS",
    )

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: naming the option.
        """
        if self.engine == "local":
            for name, value in (("--replicas", self.replicas), ("--ray-address", self.ray_address)):
                if value is not None:
                    raise ValueError(
                        f"{name} {value} needs --engine ray; add that, or leave it out"
                    )


def serve_command(
    model: str = MODEL,
    *,
    address: Address,
    load: Load,
    engine: EngineOptions,
    backend: Backend,
    budget: Budget,
    device: str | None = DEVICE,
    threads: int | None = THREADS,
    evict_every: int | None = setting(
        None,
        "While answering, evict every N tokens (64 on a CPU; 1 on a GPU, where "
        "conversations are answered by turns with more).",
        min=1,
        panel="Memory",
    ),
    chat_template: str | None = CHAT_TEMPLATE,
    sampling: Sampling,
    recalling: Recalling,
    quiet: bool = setting(
        False, "Print nothing on stderr but warnings and errors.", "--quiet", "-q", panel="Output"
    ),
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
    run = Run(model, backend, budget, running, Output(quiet=quiet))
    server = opened(run, address, load, engine, sampling, recalling)
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
    run: Run,
    address: Address,
    load: Load,
    engine: EngineOptions,
    sampling: Sampling,
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
        from kvcap.serve.app import application
        from kvcap.serve.chat_path import Settings
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
    usual = usual_body(run.budget.memory_cap)
    limits = RequestLimits(
        body_bytes=usual if load.max_body is None else parse_bytes(load.max_body),
        messages=load.max_messages,
        answer_tokens=load.max_answer_tokens,
        connections=load.max_connections,
    )
    settings = Settings(
        address.name or _name(run.model),
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

            opening: Any = open_replicas(
                Opening(replace(run, output=Output(quiet=True)), taken_on),
                settings.model,
                engine.replicas,
                engine.ray_address,
                limits.connections,
            )
            conversations, summary = opening, opening.summary
        else:
            opening = open_conversations(run, **taken_on)
            conversations, summary = opening.scheduler, opening.plan.summary
        app = application(conversations, settings, page_routes())
        server = Server(app, listening, limits, load.grace, tls)
    except BaseException:
        listening.close()
        raise
    if not run.output.quiet:
        where = f"{server.url}/v1, with a chat page at {server.url}/"
        say(("serving", "bold"), f" {settings.model} at {where} · {summary}")
    if not conversations.figures().chat_template:
        complain(f"warning: {settings.model} {NO_TEMPLATE}")
    return server


def _name(model: str) -> str:
    """Return what clients call a model by: its repository, or the last part of its path."""
    return model if REPOSITORY.fullmatch(model) else Path(model).resolve().name
