"""`kvcap android serve`: the page in a browser, results as files. Knows terminals, not requests.

What was measured goes to stdout as paths of files, everything else to stderr.
"""

from __future__ import annotations

import json as jsonlib
import queue
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcap.android_bench.errors import AndroidError

if TYPE_CHECKING:
    from kvcap.android_bench.landing import Landed
    from kvcap.android_bench.server import Serving

NOWHERE = "192.0.2.1"  # reserved for documents: nothing is sent there, but a route is chosen


class ServerMissing(AndroidError):
    """The packages that serve a page are not installed."""


class NoNetwork(AndroidError):
    """This machine has no address that a phone could reach."""


def serve_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of kvcap android plan.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", file_okay=False, help="Results go there.")
    ],
    lan: Annotated[
        bool,
        typer.Option("--lan", help="Let phones of this network in, by an address with a token."),
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="With --lan, where this machine has several addresses.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after so many results.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document a line.")] = False,
) -> None:
    """Serve a page that measures a plan in the browser that opens it."""
    try:
        from kvcap.android_bench.server import Serving
    except ImportError as error:
        raise ServerMissing(
            f"serving needs {error.name}, which is not installed; run: pip install kvcap[android]"
        ) from error
    if address is not None and not lan:
        raise ValueError("--address goes with --lan; without it only this machine is let in")
    reached = (address or lan_address()) if lan else None
    with Serving(folder, out, port=port, lan=reached) as serving:
        _invite(serving, lan)
        arrived = 0
        while count is None or arrived < count:
            try:
                landed = serving.landed.get(timeout=0.5)  # so that Ctrl-C is heard everywhere
            except queue.Empty:
                serving.check()
                continue
            arrived += 1
            _tell(landed, json)


def lan_address() -> str:
    """This machine's address on the way to other networks.

    Raises:
        NoNetwork: there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((NOWHERE, 9))
            found: str = probe.getsockname()[0]
        except OSError as error:
            raise NoNetwork(
                f"this machine is in no network ({error.strerror}); --address names one of its "
                "addresses, and kvcap android adb --browser needs none"
            ) from error
    return found


def _invite(serving: Serving, lan: bool) -> None:
    """Say where to go, as a QR code too where a phone's camera can see it."""
    said = sys.stderr
    if lan:
        import segno

        if said.isatty():
            segno.make(serving.url, error="m").terminal(said, compact=True)
        print("Whoever has this address may measure here, until this command ends:", file=said)
    print(serving.url, file=said)
    print("Ctrl-C ends.", file=said, flush=True)


def _tell(landed: Landed, json: bool) -> None:
    result = landed.result
    if json:
        device, validity = result["device"], result["validity"]
        said = {"file": str(landed.path), "device": device["model"], "source": device["source"],
                "complete": result["run"]["complete"], "valid": validity["ok"]}  # fmt: skip
        print(jsonlib.dumps(said), flush=True)
        return
    from kvcap.android_bench.source import title

    print(f"a result: {title(result)}", file=sys.stderr, flush=True)
    print(landed.path, flush=True)
