"""The chat page: what its addresses hand out, and conversations in a real browser, headless.

Needs Debian's package chromium; what axe-core finds needs that, too (scripts/install-axe).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvcap import Runtime
from kvcap.runtime.errors import ConversationUnknown
from kvcap.serve.app import Settings, application
from kvcap.serve.contract import Conversations, Figures
from kvcap.serve.limits import RequestLimits
from kvcap.serve.page_routes import FILES, HEADERS, OPEN_PATHS, PAGE, page_routes
from kvcap.serve.scheduler import Scheduler
from kvcap.serve.server import Server, bound
from kvcap.serve.strip import Strip, strip_of

AXE = Path(__file__).parents[2] / ".axe/axe.min.js"
SOON = 300_000  # milliseconds
FACT = "Please remember: the code for the blue door is 4821."
QUESTION = "What is the code for the blue door?"
LONG = "Seven kinds of mosses survive the cold near Porto. Tall grasses attract many bees. " * 6
KEYS = ("a-key", "another-key")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("pocket", budget_tokens=128, policy="keydiff-window")


def serving(conversations: Conversations, *keys: str) -> Server:
    settings = Settings("pocket", keys=keys, defaults={"max_new_tokens": 64}, open_paths=OPEN_PATHS)
    app = application(conversations, settings, page_routes())
    return Server(app, bound("127.0.0.1", 0), RequestLimits(), patience_s=0)


@pytest.fixture(scope="module")
def url(runtime) -> Iterator[str]:
    with serving(Scheduler(runtime)) as server:
        yield f"{server.url}/"


class One:
    """A conversation of one owner."""

    def __init__(self, owner: str, strip: Strip) -> None:
        self.owner, self.held = owner, strip

    async def delete(self, owner: str, session_id: str) -> None:
        await self.strip(owner, session_id)
        self.owner = ""

    async def strip(self, owner: str, session_id: str) -> Strip:
        if (owner, session_id) != (self.owner, self.held.session_id):
            raise ConversationUnknown("there is no such conversation")
        return self.held

    def figures(self) -> Figures:
        return Figures(policy=self.held.policy, budget_tokens=self.held.budget_tokens)


@pytest.fixture
def client(runtime) -> TestClient:
    """Return a client of a server that asks for keys, and has a conversation."""
    owner = hashlib.sha256(KEYS[0].encode()).hexdigest()[:32]
    one: Any = One(owner, strip_of(runtime.session(), "ada"))
    settings = Settings("pocket", keys=KEYS, hosts=None, open_paths=OPEN_PATHS)
    return TestClient(application(one, settings, page_routes()), follow_redirects=False)


@pytest.fixture
def page(browser) -> Iterator[Any]:
    """Provide a page that must not complain, of a browser that knows nothing yet."""
    context = browser.new_context(viewport={"width": 360, "height": 740})
    page, complaints = context.new_page(), []
    page.set_default_timeout(SOON)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    context.close()
    assert not [text for text in complaints if "Failed to load resource" not in text]


def opened(page: Any, url: str) -> Any:
    page.goto(url)
    page.locator("#lead", has_text="keeps").wait_for()
    return page


def press(page: Any, *names: str) -> None:
    """Press these buttons, one after the other."""
    for name in names:
        page.get_by_role("button", name=name).click()


def write(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Your message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Any) -> str:
    """Return the answer, once it is there."""
    page.get_by_role("button", name="Answer again").wait_for()
    return str(page.locator(".assistant .said").last.inner_text())


def say(page: Any, text: str) -> str:
    write(page, text)
    page.locator(".user .said").filter(has_text=text).last.wait_for()
    return answered(page)


def kept(page: Any) -> list[dict[str, Any]]:
    """Return the conversations in the browser's storage, those that changed last first."""
    entries = page.evaluate("Object.entries(localStorage)")
    chats = [json.loads(v) for k, v in entries if k.startswith("kvcap.conversation.")]
    return sorted(chats, key=lambda one: -one["changed"])


# Addresses


def test_the_page_is_a_fixed_list_of_files_under_a_strict_policy(client):
    """And needs no key."""
    there = {str(path.relative_to(PAGE)) for path in PAGE.rglob("*") if path.is_file()}
    assert {name for name, _ in FILES.values()} == {name for name in there if "LICENSE" not in name}
    for path, (name, kind) in FILES.items():
        answer = client.get(f"/{path}")
        assert answer.content == (PAGE / name).read_bytes()
        assert answer.headers["content-type"].startswith(kind)
        assert {key: answer.headers[key] for key in HEADERS} == HEADERS
        again = client.get(f"/{path}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path",
    ["/page", "/page/", "/page/../page_routes.py", "/page/%2e%2e/strip.py", "/page/..%2fstrip.py",
     "/page//app.js", "/page/app.js/", "//etc/passwd", "/page/APP.JS", "/index.html"],
)  # fmt: skip
def test_nothing_else_is_handed_out(client, path):
    assert client.get(path).status_code == 401
    client.headers["Authorization"] = f"Bearer {KEYS[0]}"
    assert client.get(path).status_code in (307, 404)
    assert client.post("/").status_code == 405


def test_the_page_has_no_way_to_make_markup_of_a_text():
    """The browser refuses these, too (Trusted Types); nothing is there that asks for them."""
    for path in PAGE.rglob("*.js"):
        text = path.read_text()
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert name not in text, f"{path.name} has {name}"
    html = (PAGE / "index.html").read_text()
    assert "<style" not in html
    assert " style=" not in html
    assert html.count("<script") == 1


def test_a_strip_is_its_owners(client, runtime):
    strip, memory = "/v1/kvcap/sessions/ada/strip", "/v1/kvcap/memory"
    assert [client.get(path).status_code for path in (strip, memory)] == [401, 401]
    client.headers["Authorization"] = f"Bearer {KEYS[1]}"
    assert client.get(strip).status_code == 404
    client.headers["Authorization"] = f"Bearer {KEYS[0]}"
    assert client.get(strip).json() == strip_of(runtime.session(), "ada").model_dump(mode="json")
    expected = {"policy": "keydiff-window", "budget_tokens": 128}
    assert client.get(memory).json() == expected


def test_a_conversation_is_deleted_by_its_owner(client):
    where = "/v1/kvcap/sessions/ada"
    assert client.delete(where).status_code == 401
    for key, status in ((KEYS[1], 404), (KEYS[0], 200), (KEYS[0], 404)):
        client.headers["Authorization"] = f"Bearer {key}"
        answer = client.delete(where)
        assert answer.status_code == status
        if status == 200:
            assert answer.json() == {
                "id": "ada",
                "object": "kvcap.session.deleted",
                "deleted": True,
            }
        else:
            assert answer.json()["error"]["code"] == "conversation_not_found"
    assert client.get(where).status_code == 405


# Conversations


def test_slots_that_wait_for_the_next_eviction_are_told_apart(page, url, runtime):
    session = runtime.session()
    list(session.send(FACT))
    figures: dict[str, Any] = strip_of(session, "").model_dump()
    figures |= {"held": 128, "waiting": 3, "tokens": ["a"] * 9000}  # shown slice by slice
    figures["groups"] = [{**group, "held": [1] * 9000} for group in figures["groups"]]
    page.route("**/strip", lambda route: route.fulfill(json=figures))
    opened(page, url)
    say(page, FACT)
    page.get_by_role("button", name="Memory", exact=True).click()
    page.locator("#held", has_text="of 128 + 3 waiting for the next eviction").wait_for()
    assert page.locator("#held").inner_text().startswith("128 slots")
    page.locator("#token-8999.s3").wait_for(state="attached")
    assert page.locator("#strip .token").count() == 9000


def test_a_conversation_and_what_is_left_of_it(page, url, runtime):
    """The words of a session in Python, and its tokens with the heads that hold them."""
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    opened(page, url)
    session = runtime.session()
    session.set_generation(max_new_tokens=64)
    for text in (FACT, LONG, QUESTION):
        assert say(page, text) == "".join(session.send(text))
    page.get_by_role("button", name="Memory", exact=True).click()
    page.locator("#held", has_text="128 slots").wait_for()
    figures = session.stats
    evicted, read = (
        f"{figures.evicted_tokens} tokens",
        f"of {figures.seen_tokens} read, by an average head",
    )
    assert page.locator("#evicted").inner_text().split("\n") == [evicted, read]
    expected = strip_of(session, "")
    spans = page.locator("#strip .token")
    assert spans.count() == len(expected.tokens) == figures.seen_tokens > 160
    for label in ("all layers", "layer 3"):
        page.get_by_label("Layers").select_option(label)
        groups = expected.groups if label == "all layers" else [expected.groups[3]]
        heads = sum(group.heads for group in groups)
        held = [sum(counts) for counts in zip(*(group.held for group in groups), strict=True)]
        classes = spans.evaluate_all("all => all.map((one) => one.className)")
        again = {i for span in expected.recalled for i in range(*span)}
        assert classes == [
            f"token s{-(-5 * count // heads)}{' recalled' * (i in again)}"
            for i, count in enumerate(held)
        ]
        assert len(set(held)) > 2
        counted = f"{len(held) - held.count(0)} of {len(held)} tokens are held"
        summary = page.locator("#summary").inner_text()
        assert summary.startswith("Every head keeps tokens of its own")
        assert counted in summary
    assert all(address.startswith(url) for address in addresses)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.keyboard.press("Escape")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.slow
def test_the_strip_is_read_by_keys(page, url):
    opened(page, url).set_viewport_size({"width": 1300, "height": 800})
    say(page, FACT)
    strip = page.get_by_role("listbox", name="Tokens of the conversation")
    strip.focus()
    page.keyboard.press("End")
    last = strip.get_by_role("option", selected=True)
    assert "held by 12 of 12 heads" in last.get_attribute("aria-label")
    assert page.locator("#layers li").all_inner_texts() == [f"{i}: 2/2" for i in range(6)]
    page.keyboard.press("Home")
    assert "<|bos|>" in last.get_attribute("aria-label")
    assert strip.get_attribute("aria-activedescendant") == "token-0"


def test_what_was_recalled_is_marked_and_told_below_the_answer(page, url):
    runtime = Runtime.from_pretrained("pocket", "streaming_llm", budget_tokens=128)
    question, session = "What is the secret code of the vault?", runtime.session()
    session.set_generation(max_new_tokens=16)
    for text in ("The secret code of the vault is 7421. Remember it.", LONG, LONG, question):
        list(session.send(text))
    tokens = session.turn.recalled_tokens
    note = f"recalled 1 passage, {tokens} tokens"
    shown = strip_of(session, "").model_dump()
    page.route("**/strip", lambda route: route.fulfill(json=shown))
    usage = {"completion_tokens": 9, "recalled": tokens, "recalled_passages": 1}
    replied(page, url, question, {"content": "7421."}, usage=usage)
    assert page.locator(".assistant .recall-note").inner_text() == note
    page.locator("#strip .recalled").first.wait_for(state="attached")
    marked = page.locator("#strip .recalled").all_text_contents()
    assert len(marked) == tokens
    assert "vault is 7421" in "".join(marked)
    assert page.locator("#strip .pinned").count() == 0
    page.get_by_role("button", name="Memory", exact=True).click()
    summary = page.locator("#summary").inner_text()
    assert re.match(r"[\d,]+ of [\d,]+ tokens are held by every head, ", summary)
    assert f"{tokens} are recalled text" in summary
    page.locator("#strip .recalled").first.click()
    assert "evicted text that was read again" in page.locator("#said").inner_text()
    page.keyboard.press("Escape")
    page.reload()
    assert page.locator(".recall-note").all_inner_texts() == [note]
    page.locator(".recall-note").click()
    text = page.locator(".recalled-texts p").inner_text()
    assert text.split() == "".join(marked).replace("↵", "").split()
    assert "vault is 7421" in text
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_pinned_message_stays(page, url):
    opened(page, url)
    say(page, FACT)
    press(page, "Pin")
    assert page.get_by_role("button", name="Pinned").get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.activeElement.textContent") == "Pinned"
    say(page, LONG)
    say(page, LONG)
    page.locator("#strip .pinned").first.wait_for(state="attached")
    pinned = page.locator("#strip .pinned").evaluate_all(
        "all => all.map((one) => [one.textContent, one.className])"
    )
    assert FACT in "".join(text for text, _ in pinned)
    assert {name for _, name in pinned} == {"token s5 pinned"}
    assert kept(page)[0]["pins"] == [0]


@pytest.mark.slow
def test_conversations_are_kept_in_this_browser(page, url):
    opened(page, url)
    first = say(page, FACT)
    page.reload()
    assert answered(page) == first
    press(page, "Conversations", "New conversation")
    say(page, "Hello!")
    assert [one["messages"][0]["content"] for one in kept(page)] == ["Hello!", FACT]
    press(page, "Conversations")
    page.get_by_role("button", name=FACT[:40]).first.click()
    assert answered(page) == first
    page.locator("#strip .token").first.wait_for(state="attached")
    press(page, "Conversations", "Delete “Hello!”")
    assert [one["messages"][0]["content"] for one in kept(page)] == [FACT]
    page.keyboard.press("Escape")
    press(page, "Undo")
    page.locator(".user .said", has_text="Hello!").wait_for()
    assert len(kept(page)) == 2
    page.evaluate("localStorage.setItem('kvcap.conversation.x', '{\"id\": 1}')")
    opened(page, url)
    page.locator(".user .said", has_text="Hello!").wait_for()  # what is not ours is left alone


SLOWLY = """{
  const plain = fetch;
  window.fetch = async (path, options) => {
    const found = await plain(path, options);
    if (!path.endsWith('completions')) return found;
    let left = '';
    const slow = new TransformStream({
      transform: async (piece, to) => {
        const events = (left + piece).split('\\n\\n');
        left = events.pop();  // the network joins and cuts events as it likes
        for (const event of events) {
          to.enqueue(`${event}\\n\\n`);
          if (options.signal.aborted) return;
          if (!/"content": ?"[^"]|prompt_progress/.test(event)) continue;
          await new Promise((go) => {
            window.next = go;
            options.signal.addEventListener('abort', go);
          });
        }
      },
    });
    const text = found.body.pipeThrough(new TextDecoderStream()).pipeThrough(slow);
    return new Response(text.pipeThrough(new TextEncoderStream()), found);
  };
}"""  # an event that the page shows for every window.next()
GO_ON = "setInterval(() => window.next?.(), 1)"


def halfway(page: Any, url: str) -> None:
    """Send the fact, and wait until its answer has begun, which goes on once that is said."""
    page.add_init_script(SLOWLY)
    opened(page, url)
    write(page, FACT)
    page.get_by_text("Okay", exact=False).wait_for()


def test_an_answer_is_stopped_and_given_again(page, url):
    halfway(page, url)
    page.keyboard.press("Escape")
    page.get_by_text("Stopped before its end").wait_for()
    begun = answered(page)
    assert kept(page)[0]["messages"][-1]["content"].strip() == begun
    page.evaluate("window.next = null; setInterval(() => window.next?.(), 1)")
    press(page, "Answer again")
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    whole = answered(page)
    assert whole.startswith(begun)
    assert len(whole) > len(begun)
    assert [one["role"] for one in kept(page)[0]["messages"]] == ["user", "assistant"]


def test_how_far_a_long_message_is_read_is_shown(page, url):
    page.add_init_script(SLOWLY)
    read = {"total": 1600, "cache": 0, "processed": 400, "time_ms": 10}
    answering(page, {"content": "Yes."}, before={"choices": [], "prompt_progress": read})
    opened(page, url)
    write(page, LONG)
    reading = page.get_by_text(re.compile(r"^Reading: [\d,]+ of [\d,]+ tokens"))
    reading.wait_for()
    assert page.locator(".writing").is_hidden(), "an empty bubble"
    assert "Reading: 400 of 1,600 tokens" in reading.inner_text()
    value = page.get_by_role("progressbar", name="Read so far").evaluate("one => one.value")
    assert value == 0.25
    page.evaluate(GO_ON)
    assert answered(page)
    assert reading.count() == 0


def test_a_long_text_is_pasted_beside_the_field_and_folded_once_it_is_sent(page, url):
    """The field would lay a megabyte out anew with every letter, in seconds."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answering(page, {"content": "Yes."})
    opened(page, url)
    pasted = "Seven kinds of mosses survive the cold near Porto. " * 20_000
    page.evaluate("(text) => navigator.clipboard.writeText(text)", pasted)
    text = page.get_by_role("textbox", name="Your message")
    text.focus()
    for _ in range(2):
        page.keyboard.press("Control+V")
    page.get_by_role("button", name="Remove the pasted text").first.click()
    assert page.locator("#pasted li").count() == 1
    assert page.locator("#pasted").get_by_text("1,020,000 letters").is_visible()
    text.press_sequentially("Is it long?")
    with page.expect_request("**/v1/chat/completions") as request:
        page.keyboard.press("Enter")
    (message,) = json.loads(request.value.post_data)["messages"]
    assert message["content"] == f"{pasted}\n\nIs it long?"
    answered(page)
    assert page.locator("#pasted li").count() == 0
    bubble = page.locator(".user .said")
    assert len(bubble.inner_text()) < 1000
    press(page, "Show all 1,020,013 letters")
    assert bubble.text_content() == message["content"]
    press(page, "Show less")
    assert len(bubble.inner_text()) < 1000
    press(page, "Edit")
    assert text.input_value() == "Is it long?"
    assert page.locator("#pasted li").count() == 1


@pytest.mark.slow
def test_a_message_is_edited_and_that_is_undone(page, url):
    opened(page, url)
    first = say(page, FACT)
    second = say(page, QUESTION)
    text = page.get_by_role("textbox", name="Your message")
    text.fill("a draft")
    page.get_by_role("button", name="Edit").first.click()
    assert text.input_value() == FACT
    page.keyboard.press("Escape")
    assert text.input_value() == "a draft"
    page.get_by_role("button", name="Edit").first.click()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    write(page, FACT.replace("4821", "1930"))
    page.get_by_role("alert").get_by_text("cannot be reached").wait_for()
    assert text.input_value() == FACT.replace("4821", "1930")
    assert page.locator(".said").count() == 4
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    page.get_by_text("What was said before from here on is replaced").wait_for()
    assert text.input_value() == "a draft"
    assert [one["content"] for one in kept(page)[0]["messages"]] == [
        FACT.replace("4821", "1930"),
        answered(page),
    ]
    press(page, "Undo")
    texts = [FACT, first, QUESTION, second]
    assert page.locator(".said").all_inner_texts() == texts
    assert [one["content"].strip() for one in kept(page)[0]["messages"]] == texts


@pytest.mark.slow
def test_what_is_stopped_before_it_is_answered_is_taken_back(page, url):
    opened(page, url)
    page.route("**/v1/chat/completions", lambda route: None)  # it is read, and read
    write(page, FACT)
    page.get_by_text("Reading").wait_for()
    press(page, "Stop")
    page.get_by_text("the message is taken back").wait_for()
    assert page.get_by_role("textbox").input_value() == FACT
    assert page.locator(".said").count() == 0
    assert kept(page) == []
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    assert "4821" in answered(page)


def second_tab(page: Any, url: str, script: str = "") -> Any:
    """Another tab, on the conversation that is listed first."""
    other = page.context.new_page()
    other.set_default_timeout(SOON)
    other.add_init_script(script)
    opened(other, url)
    press(other, "Conversations")
    other.locator("#list .open").first.click()
    return other


@pytest.mark.slow
@pytest.mark.parametrize("hears", [True, False])
def test_two_tabs_of_a_conversation_lose_nothing(page, url, hears):
    """Also where a tab has not heard yet of what the other one said."""
    opened(page, url)
    say(page, "Hello!")
    deaf = "addEventListener('storage', (e) => e.stopImmediatePropagation())"
    other = second_tab(page, url, "" if hears else deaf)
    answered(other)
    say(page, FACT)
    if hears:
        other.locator(".user .said", has_text=FACT).wait_for()
    say(other, QUESTION)
    page.locator(".user .said", has_text=QUESTION).wait_for()
    (one,) = kept(page)
    questions = [message["content"] for message in one["messages"] if message["role"] == "user"]
    assert questions == ["Hello!", FACT, QUESTION]
    assert page.locator(".said").all_inner_texts() == other.locator(".said").all_inner_texts()


def test_one_tab_at_a_time_answers_a_conversation(page, url):
    halfway(page, url)
    other = second_tab(page, url)
    write(other, QUESTION)
    other.get_by_role("alert").get_by_text("being answered in another tab").wait_for()
    assert other.get_by_role("textbox").input_value() == QUESTION
    assert [one["content"] for one in kept(page)[0]["messages"]] == [FACT]
    page.evaluate(GO_ON)
    answered(page)
    answered(other)
    other.get_by_role("textbox").press("Enter")
    page.locator(".user .said", has_text=QUESTION).wait_for()
    assert "4821" in answered(page)


@pytest.mark.slow
def test_without_locks_what_two_tabs_say_at_once_is_kept_twice(page, url):
    """Hide the locks that a browser has over HTTPS and on this machine alone."""
    lockless = "Object.defineProperty(navigator, 'locks', { value: undefined });"
    page.add_init_script(lockless)
    halfway(page, url)
    other = second_tab(page, url, lockless)
    write(other, QUESTION)  # waits for the other answer, as the server answers by turns
    other.locator(".user .said", has_text=QUESTION).wait_for()
    page.evaluate(GO_ON)
    answered(other)
    page.get_by_text("Another tab has gone on with this conversation").wait_for()
    chats = [[one["content"] for one in chat["messages"]] for chat in kept(page)]
    assert sorted(map(len, chats)) == [2, 2]
    assert {chat[0] for chat in chats} == {FACT, f"{FACT}\n\n{QUESTION}"}
    press(page, "Open it")
    assert page.locator(".user .said").inner_text() == FACT


FULL = """for (let size = 2 ** 20; size >= 1; size /= 2) {
  try {
    for (;;) {
      const key = `kvcap.conversation.junk${size}-${localStorage.length}`;
      localStorage.setItem(key, 'x'.repeat(size));
    }
  } catch { /* the next half */ }
}"""


def test_full_storage_is_shown_and_loses_nothing(page, url):
    opened(page, url)
    say(page, "Hello!")
    page.evaluate(FULL)
    press(page, "Conversations", "New conversation")
    first = say(page, FACT)
    alert = page.get_by_role("alert")
    alert.get_by_text(f"no room left: “{FACT}” is lost when this tab is closed").wait_for()
    say(page, QUESTION)
    with page.expect_download() as download:
        press(alert, "Export")
    (saved,) = json.loads(download.value.path().read_text())
    assert [one["content"] for one in saved["messages"]][:3] == [FACT, first, QUESTION]
    dialogs: list[str] = []
    page.once("dialog", lambda dialog: (dialogs.append(dialog.type), dialog.dismiss()))
    page.evaluate("setTimeout(() => location.reload())")
    while not dialogs:  # the browser asks, and the page stays
        page.wait_for_timeout(10)
    assert dialogs == ["beforeunload"]
    press(page, "Conversations")
    page.locator("#list .open", has_text="Hello!").click()
    press(page, "Conversations")
    page.locator("#list .open", has_text=FACT).click()
    assert page.locator(".said").count() == 4
    page.evaluate(NO_JUNK)
    press(page, "Conversations", "Delete “Hello!”")
    page.locator("#full").wait_for(state="hidden")
    assert [one["id"] for one in kept(page)] == [saved["id"]]


NO_JUNK = "for (const key in localStorage) if (key.includes('junk')) delete localStorage[key]"


@pytest.mark.slow
def test_what_two_tabs_said_while_the_storage_was_full_is_kept_twice(page, url):
    opened(page, url)
    say(page, "Hello!")
    page.evaluate(FULL)
    say(page, FACT)
    page.locator("#full").wait_for()
    page.evaluate(NO_JUNK)
    other = second_tab(page, url)
    say(other, QUESTION)
    page.get_by_role("button", name="Pin", exact=True).first.click()
    page.locator("#full").wait_for(state="hidden")
    texts = [[one["content"] for one in chat["messages"]][2] for chat in kept(page)]
    assert sorted(texts) == sorted([FACT, QUESTION])


def test_half_an_answer_comes_back_with_its_deleted_conversation(page, url):
    halfway(page, url)
    press(page, "Conversations", f"Delete “{FACT}”")
    assert kept(page) == []
    page.keyboard.press("Escape")
    press(page, "Undo")
    page.get_by_text("Stopped before its end").wait_for()
    assert answered(page).startswith("Okay")


def test_an_answer_goes_on_while_another_conversation_is_in_sight(page, url, runtime):
    halfway(page, url)
    press(page, "Conversations", "New conversation")
    assert page.locator(".said").count() == 0
    assert page.get_by_role("button", name="Send").is_visible()
    busy = page.locator("#list .busy", has_text="being answered")
    busy.wait_for(state="attached")
    page.set_viewport_size({"width": 1280, "height": 800})
    title = busy.locator(".name")
    assert title.bounding_box()["y"] - busy.bounding_box()["y"] <= 10, "below its mark"
    page.evaluate(GO_ON)
    page.get_by_text(f"“{FACT}” is answered.").wait_for()
    press(page, "Open it")
    session = runtime.session()
    session.set_generation(max_new_tokens=64)
    assert answered(page) == "".join(session.send(FACT))


def test_half_an_answer_is_marked_after_a_reload_and_gone_on_with(page, url):
    halfway(page, url)
    page.reload()
    page.get_by_text("Stopped before its end").wait_for()
    half = kept(page)[0]["messages"]
    assert half[1]["ended"] == "stopped"
    requests: list[Any] = []

    def go_on(route: Any) -> None:
        requests.append(json.loads(route.request.post_data)["messages"])
        piece = {"choices": [{"delta": {"content": " and more"}, "finish_reason": "stop"}]}
        route.fulfill(body=f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", go_on)
    page.evaluate(GO_ON)
    press(page, "Continue")
    page.locator(".assistant .said", has_text="and more").wait_for()
    assert requests == [[{key: one[key] for key in ("role", "content")} for one in half]]
    answered(page)
    whole = {"role": "assistant", "content": f"{half[1]['content']} and more", "took": {}}
    assert kept(page)[0]["messages"] == [half[0], whole]


def fulfilled(given: dict[str, Any], route: Any) -> None:
    route.fulfill(**given)


@pytest.mark.slow
def test_refusals_are_told_and_nothing_is_lost(page, url):
    opened(page, url)
    say(page, "Hello!")
    busy = {"error": {"message": "16 requests wait already"}}
    for status, headers, body, says in (
        (429, {"Retry-After": "3"}, json.dumps(busy), "16 requests wait already. Try again in 3"),
        (502, {}, "<h1>Bad gateway</h1>", "The server answered 502"),
        (200, {}, 'data: {"error": {"message": "memory is full"}}\n\n', "Memory is full."),
        (200, {}, 'data: {"choices": []}\n\n', "The answer broke off"),
    ):
        given = {"status": status, "headers": headers, "body": body}
        page.route("**/v1/chat/completions", partial(fulfilled, given))
        write(page, FACT)
        page.get_by_role("alert").get_by_text(says).wait_for()
        assert page.get_by_role("textbox").input_value() == FACT
        page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    press(page, "Answer again")
    page.get_by_role("alert").get_by_text("cannot be reached").wait_for()
    assert page.locator(".said").count() == 2, "the former answer stays"
    page.unroute("**/v1/chat/completions")
    page.get_by_role("textbox").fill(FACT)
    page.get_by_role("textbox").press("Enter")
    page.locator(".said").nth(3).wait_for()
    assert answered(page)


@pytest.mark.parametrize("template", [{}, {"chat_template": False}])
def test_a_model_without_a_chat_template_is_named_before_the_first_message(page, url, template):
    models = {"data": [{"id": "a-model", **template}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    opened(page, url)
    chats = template.get("chat_template", True)
    assert page.get_by_text("has no chat template").is_visible() == (not chats)
    assert page.get_by_role("textbox").is_enabled() == chats
    assert page.get_by_role("button", name="Send").is_enabled() == chats


def test_a_key_is_asked_for_and_stays_in_the_tab(page, runtime):
    with serving(Scheduler(runtime), *KEYS) as server:
        page.goto(server.url)
        for key in ("wrong", KEYS[1]):
            page.get_by_label("API key").fill(key)
            press(page, "Use this key")
            if key == "wrong":
                page.get_by_text("does not take the key").wait_for()
        page.locator("#lead", has_text="keeps").wait_for()
        assert say(page, "Hello!")
        page.reload()
        page.locator("#lead", has_text="keeps").wait_for()
        assert KEYS[1] not in json.dumps(page.evaluate("Object.entries(localStorage)"))
        other = page.context.new_page()
        other.set_default_timeout(SOON)
        other.goto(server.url)
        press(other, "Not now")
        other.get_by_role("alert").get_by_text("Without its key").wait_for()


def answering(page: Any, *deltas: dict[str, str], before: Any = None, **more: Any) -> None:
    """Answer everything by the event before, if any, and by these deltas, without the model."""
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    events = [{"choices": [one]} for one in choices] + [{"choices": [], **more}]
    events[:0] = [before] if before else []
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", partial(fulfilled, {"body": body}))


def replied(page: Any, url: str, text: str, *deltas: dict[str, str], **more: Any) -> str:
    """Open the page, send a message, and return its answer, which is of these deltas."""
    answering(page, *deltas, **more)
    return say(opened(page, url), text)


def test_texts_from_right_to_left(page, url):
    hebrew = "\u05e9\u05dc\u05d5\u05dd"
    answering(page, {"content": f"Hello\n\n{hebrew} `a` b\n\n- {hebrew}\n\n```\n{hebrew}\n```"})
    opened(page, url)
    page.get_by_role("textbox").fill(hebrew)
    directions = "all => all.map((one) => getComputedStyle(one).direction)"
    assert page.get_by_role("textbox").evaluate_all(directions) == ["rtl"]
    page.keyboard.press("Enter")
    answered(page)
    parts = {
        ".user .said": "rtl",
        "h1": "rtl",
        ".assistant li": "rtl",
        "pre": "ltr",
        ".assistant p code": "ltr",
    }
    for selector, direction in parts.items():
        assert page.locator(selector).evaluate_all(directions) == [direction], selector
    assert page.locator(".assistant .said > p").evaluate_all(directions) == ["ltr", "rtl"]
    starts = "one => getComputedStyle(one).paddingRight"
    assert page.locator(".assistant ul").evaluate(starts) != "0px"


THOUGHTS = [
    [{"reasoning_content": "So"}, {"reasoning_content": " it is."}, {"content": "Yes."}],
    [{"content": "<think>\nSo it"}, {"content": " is.\n</think>\n\nYes."}],
]


@pytest.mark.parametrize("deltas", THOUGHTS)
def test_what_a_model_thinks_is_folded(page, url, deltas):
    assert replied(page, url, "Is it?", *deltas) == "Yes."
    assert page.get_by_text("So it is.").is_hidden()
    page.get_by_text("Thoughts", exact=True).click()
    assert page.get_by_text("So it is.").is_visible()
    given = "So it is." if "reasoning_content" in deltas[0] else None
    assert kept(page)[0]["messages"][1].get("reasoning_content") == given


def test_how_fast_an_answer_came_is_shown(page, url):
    page.add_init_script("let seconds = 0; performance.now = () => 1000 * (seconds += 10);")
    usage = {"completion_tokens": 1200}
    replied(page, url, "Hello!", {"content": "a"}, {"content": "b"}, usage=usage)
    assert page.locator(".note").inner_text() == "1,200 tokens, 120 a second"


def test_a_conversation_has_a_title_a_system_prompt_and_settings(page, url):
    answering(page, {"content": "<think>Hm.</think>Yes."})
    opened(page, url)
    for label, value in {
        "Title": "Doors",
        "System prompt": "Be brief.",
        "Temperature": "0.3",
        "Most tokens of an answer": "7",
    }.items():
        if label == "Title":
            press(page, "About this conversation")
        page.get_by_label(label).fill(value)
    press(page, "Save")
    assert kept(page) == []
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, FACT)
    body = json.loads(request.value.post_data)
    system = {"role": "system", "content": "Be brief."}
    assert body["messages"] == [system, {"role": "user", "content": FACT}]
    assert (body["temperature"], body["max_tokens"]) == (0.3, 7)
    page.reload()
    assert page.locator("h1").inner_text() == "Doors"
    press(page, "About this conversation")
    files = {}
    for kind in ("Markdown", "JSON"):
        with page.expect_download() as download:
            press(page, f"Export as {kind}")
        files[download.value.suggested_filename] = download.value.path().read_text()
    assert json.loads(files["Doors.json"]) == kept(page)[0]
    assert files["Doors.md"] == (
        f"# Doors\n\n## System prompt\n\nBe brief.\n\n## You\n\n{FACT}\n\n## Answer\n\nYes.\n"
    )
    page.get_by_label("Title").fill("")
    page.get_by_label("Most tokens of an answer").fill("")
    press(page, "Save")
    assert page.locator("h1").inner_text() == FACT
    press(page, "Conversations", "New conversation")
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "Hello!")
    body = json.loads(request.value.post_data)
    assert body["messages"][0] == system
    assert (body["temperature"], body["max_tokens"]) == (0.3, None)


MANY = (
    "### A\n\n`b` [c](https://d.example)\n\n```py\ndef e(): # f\n    return 1, 'g'\n```\n\n"
    "|h|\n|-|\n|i|\n\n- [x] j\n- [ ] k"
)
BEGUN = """async () => {
  (await import('./page/draft.js')).draft.text = 'a '.repeat(20_000);
  const turn = new (await import('./page/turns.js')).LiveTurn();
  turn.update({ content: '' }, { total: 9, cache: 0, processed: 3, time_ms: 9000 });
  document.getElementById('log').append(turn.element);
}"""  # a long text to be sent, and one that is being read


@pytest.mark.slow
@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: scripts/install-axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(page, url, width, scheme):
    """Axe-core looks at the page with and without a conversation, its drawers and its dialog."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    answering(page, {"reasoning_content": "Hm."}, {"content": MANY}, usage={"completion_tokens": 9})
    opened(page, url)
    look = (
        f"{AXE.read_text()}; axe.run().then(({{ violations }}) => violations.map((one) => one.id))"
    )
    assert page.evaluate(look) == []
    say(page, "Hello!")
    page.get_by_text("Thoughts").click()
    page.locator(".code-kwd").first.wait_for()
    page.evaluate(BEGUN)
    page.get_by_text("Reading: 3 of 9 tokens, about 18 s left").wait_for()
    assert page.evaluate(look) == []
    names = ["About this conversation"] + ["Conversations", "Memory"] * (width < 760)
    for name in names:
        page.get_by_role("button", name=name, exact=True).click()
        assert page.evaluate(look) == [], name
        page.keyboard.press("Escape")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


FORMULAS = """Euler: $e^{i\\pi} + 1 = 0$, \\(a_1\\) and $$b^2$$ in a line; $5 and $6, $7-$8.

As here:
$$
\\int_0^1 x^2 \\, dx
= \\frac{1}{3}
$$
\\[ \\sum_k k \\]

No TeX: $\\frac{1$, $\\href{javascript:alert(1)}{d}$, $\\includegraphics{e.png}$.
Too wide: $\\rule{9999em}{1em}$."""


def test_formulas_are_set(page, url):
    replied(page, url, "Hello!", {"content": FORMULAS})
    page.locator("math").nth(5).wait_for()
    parts = {"msup": 3, "msub": 1, "mfrac": 1, "munder": 1, "math[display=block]": 2}
    assert {name: page.locator(name).count() for name in parts} == parts
    text = page.locator(".assistant .said").inner_text()
    for plain in (
        "$5 and $6, $7-$8.",
        "$\\frac{1$",
        "$\\href{javascript",
        "$\\includegraphics{e.png}$",
    ):
        assert plain in text
    assert page.locator(".said a, .said img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_conversations_are_searched(page, url):
    answering(page, {"content": "Larch and fir."})
    opened(page, url)
    for text in ("Trees of the north?", "Trees of the south?"):
        press(page, "Conversations", "New conversation")
        say(page, text)
    press(page, "Conversations")
    search = page.get_by_role("searchbox", name="Search the conversations")
    for words, count in {"larch north": 1, "palm": 0}.items():
        search.fill(words)
        assert page.locator("#list .open").count() == count
        assert page.get_by_text("No conversation has these words").is_visible() == (not count)
    search.fill("")
    page.set_viewport_size({"width": 1280, "height": 800})
    whole = "(all) => all.map((one) => one.scrollWidth <= one.clientWidth)"
    assert page.locator("#list .open, #list .name").evaluate_all(whole) == [True] * 4


def test_a_phone_shows_everything_and_fingers_can_hit_it(page, url):
    name = "SmolLM2-1.7B-Instruct-with-a-long-name-of-many-words-Q4_1"
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": f"a/{name}"}]}))
    answering(page, {"reasoning_content": "Hm."}, {"content": MANY})
    opened(page, url).set_viewport_size({"width": 390, "height": 844})
    page.get_by_text("Please remember").click()  # the example
    answered(page)
    say(page, LONG)
    page.get_by_text("Thoughts").first.click()
    tell = page.locator("#lead", has_text=f"{name} keeps 128 tokens")
    for part in (tell, page.locator("h1"), page.get_by_role("button", name="Memory", exact=True)):
        box = part.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert part.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    for opener in ("Conversations", "Memory", "About this conversation"):
        assert page.evaluate(SMALL) == []
        page.get_by_role("button", name=opener, exact=True).click()
        assert page.evaluate(SMALL) == [], opener
        page.keyboard.press("Escape")


SMALL = """() => [...document.querySelectorAll('button, summary, select, textarea, input:enabled')]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }))
  .map((one) => [one.outerHTML, one.getBoundingClientRect()])
  .filter(([, { width, height }]) => width < 44 || height < 44).map(([html]) => html)"""


def test_the_end_is_one_click_away(page, url):
    replied(page, url, "Hello!", {"content": "a\n\n" * 100})
    to_end = page.get_by_role("button", name="To the end")
    assert to_end.is_hidden()
    page.locator("#log").evaluate("one => { one.scrollTop = 0; }")
    to_end.click()
    to_end.wait_for(state="hidden")
    assert page.locator(".assistant .tools").is_visible()


def test_code_is_copied(page, url):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    replied(page, url, "Hello!", {"content": "So:\n\n```py\nprint(1)\n\nprint(2)\n```\n\nDone."})
    page.locator(".code-num").first.wait_for()  # its language came from the server
    press(page, "Copy the code")
    page.locator(".code").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n\nprint(2)"
