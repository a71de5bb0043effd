"""Chat templates of strangers: what computes for ever or fills the memory is ended by name."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make import in_python
from transformers import AutoTokenizer

import kvcap
from kvcap import pocket
from kvcap.runtime.errors import ChatTemplateMissing
from kvcap.runtime.session import chat_template
from kvcap.runtime.session.chat_template import TemplateFailed, render_template
from kvcap.runtime.session.messages import render

SRC = str(Path(kvcap.__file__).parents[1])
MESSAGES = [{"role": "user", "content": "Hi."}]
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set ns = namespace(s='aa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s | length }}"
)
posix = pytest.mark.skipif(os.name != "posix", reason="needs limits of the processor's time")


class Plain:
    """A tokenizer of which only the template matters."""

    special_tokens_map = {"bos_token": "<s>"}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        self.chat_template = template


@posix
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (NESTED, "computes for more than"),
        ("{{ 10 ** (10 ** 8) }}", "computes for more than"),
        (GROWING, "MiB|computes for"),
        ("{{ 'x' * 10 ** 12 }}", "MiB"),
        ("{{ '%1000000000s' % 'x' }}", "MiB|computes for"),
        ("{{ 'x' | center(10 ** 9) }}", "MiB|computes for"),
        ("{{ 'x' * 10 ** 7 }}", "writes 10,000,000 letters|computes for"),
        ("{{ range(10 ** 12) }}", "Range too big"),
    ],
)
def test_templates_without_an_end_are_refused(template, says, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    with pytest.raises(ChatTemplateMissing, match=says):
        render(Plain(template), MESSAGES)
    monkeypatch.undo()
    assert render(Plain("{{ bos_token }}{{ messages[0].content }}"), MESSAGES) == "<s>Hi."


def test_what_transformers_writes():
    """The same text for the built-in model, with a system prompt and without."""
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    for talk in (MESSAGES, [{"role": "system", "content": "Be kind.\u2028"}, *MESSAGES]):
        assert render(tokenizer, talk) == tokenizer.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True
        )


def test_one_process_renders_all_and_is_replaced_if_it_ends():
    assert render_template("{{ x }}", {"x": 1}) == "1"
    first = chat_template._renderer().process
    assert render_template("{{ x }}", {"x": "\n\u2028\0"}) == "\n\u2028\0"
    assert chat_template._renderer().process is first
    first.kill()
    first.wait()
    assert render_template("{{ x }}", {"x": 2}) == "2"


def test_threads_take_turns():
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda i: render_template("{{ x * 1000 }}", {"x": str(i)}), range(8))
    assert list(texts) == [str(i) * 1000 for i in range(8)]


@pytest.mark.slow
@posix
def test_ctrl_c_ends_a_template():
    """The process that waits for it is free at once, and what it asks next is answered."""
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        render_template(NESTED, {})
    assert render_template("{{ x }}", {"x": 3}) == "3"


@posix
def test_nothing_outlives_the_process():
    code = (
        "import os, signal\n"
        "from kvcap.runtime.session import chat_template\n"
        "chat_template.render_template('x', {})\n"
        "print(chat_template._renderer().process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = in_python(code)
    assert done.returncode == -signal.SIGKILL
    import psutil

    try:
        psutil.Process(int(done.stdout)).wait()
    except psutil.NoSuchProcess:
        return


def test_files_of_the_current_directory_are_not_run(tmp_path):
    for name in ("jinja2.py", "json.py", "signal.py"):
        (tmp_path / name).write_text("raise SystemExit('run')")
    code = (
        "import sys\nsys.path[:] = [x for x in sys.path if x] + sys.argv[1:]\n"
        "from kvcap.runtime.session import chat_template\n"
        "print(chat_template.render_template('{{ 1 }}', {}))\n"
    )
    done = in_python(code, SRC, cwd=tmp_path, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert done.stdout == "1\n", done.stderr


def test_a_request_is_one_line():
    """Newlines within are escaped, so that neither side waits for the other."""
    with pytest.raises(TemplateFailed, match="Expected an expression"):
        render_template("{% if %}\n\n{{", {"a": "\r\n"})
    assert (
        json.loads(render_template("{{ messages | tojson }}", {"messages": MESSAGES})) == MESSAGES
    )
