// The chat page: what it shows when. Conversations lie in `store.js`, the network in `api.js`.

import { askAbout } from "./about.js";
import { Answer, answerIn, keepAll } from "./answers.js";
import { Api } from "./api.js";
import { byId, bytes, html, number, show } from "./dom.js";
import { draft } from "./draft.js";
import { exportJson } from "./exports.js";
import { closePanels } from "./panels.js";
import * as store from "./store.js";
import { Strip } from "./strip.js";
import { parted } from "./thoughts.js";
import { LiveTurn, turn } from "./turns.js";

const READING = "Reading …"; // the messages, before there is an answer
const NEAR = 120; // pixels from the end within which what is written is followed
const WHY_KEY = "It was started with an API key. The key stays in this tab until it is closed, and is sent to this server alone.";

const api = new Api(store.apiKey.get), strip = new Strip();
let now = store.begun(); // the conversation that is shown
let model = null; // its name for the API
let editing = null; // the message that is written anew: {index, content, draft}
let live = null; // what is shown of the answer in sight that is being written: {one, turn, frame}

// The server, its model and its key

/** Ask the server for its model, and for a key where it wants one. */
async function greet() {
  try {
    const { policy, budget_tokens: budget, ...found } = await api.facts();
    model = found.model;
    show("no-template", !found.chats);
    byId("text").disabled = byId("send").disabled = byId("example").disabled = !found.chats;
    byId("model").textContent = `${model.split("/").at(-1)} keeps ${number(budget)} tokens`;
    byId("keeps").textContent = `the ${number(budget)} tokens, words or parts of words,`;
    byId("policy").replaceChildren(policy, html("small", {}, `budget ${number(budget)} slots`));
    trouble(null);
    await refresh();
  } catch (error) {
    byId("model").textContent = "";
    refused(error, greet);
  }
}

/** Tell of an error, or ask for the key where that is what is missing; then `again` may help. */
function refused(error, again) {
  if (error.status === 401) return askKey(error, again);
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter}\u00a0s.` : "";
  trouble(`${sentence(error.message)}${wait}`, again);
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

function trouble(text, again = null) {
  show("trouble", text !== null);
  byId("trouble-text").textContent = text ?? "";
  byId("again").hidden = again === null;
  byId("again").onclick = () => {
    trouble(null);
    again();
  };
}

function askKey(error, again) {
  const dialog = byId("key-dialog"), had = store.apiKey.get() !== "";
  byId("key-why").textContent = had && error ? "The server does not take the key that it was given. Give another one." : WHY_KEY;
  byId("key").value = "";
  show("key-change");
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    store.apiKey.set(byId("key").value.trim());
    dialog.close();
    again();
  };
  byId("key-cancel").onclick = () => {
    dialog.close();
    if (error) trouble("Without its key this server does not answer.", again);
  };
  if (!dialog.open) dialog.showModal();
}

byId("key-change").addEventListener("click", () => askKey(null, greet));
byId("trouble-close").addEventListener("click", () => trouble(null));

// The memory

/** Show what the server holds of the conversation in sight, and return it; null where that is nothing. */
async function refresh() {
  const { id, messages } = now;
  const found = messages.length ? await api.strip(id) : null;
  if (id !== now.id) return null; // another one is in sight by now
  if (found) showMemory(found);
  else forgetMemory();
  return found;
}

/** Keep with the answer that is there what was recalled for it, as long as the server knows. */
function keepRecalled(found) {
  const took = store.find(now.id)?.messages.at(-1)?.took, spans = found && took?.recalled && lastOf(found.recalled, took.recalled);
  if (!spans || answerIn(now.id)) return;
  const texts = spans.map((span) => found.tokens.slice(...span).join("").trim());
  change(({ messages }) => Object.assign(messages.at(-1).took, { texts }));
  showConversation(false);
}

/** The last spans that are so many tokens together; null where none are. */
function lastOf(spans, count) {
  const found = [];
  for (let i = spans.length; count > 0 && i > 0;) {
    found.unshift(spans[--i]);
    count -= spans[i][1] - spans[i][0];
  }
  return count === 0 ? found : null;
}

function showMemory(found) {
  const { budget_tokens: budget, held, waiting, evicted, tokens } = found;
  fill(held / budget);
  const waits = waiting ? ` + ${number(waiting)} waiting for the next eviction` : "";
  byId("held").replaceChildren(`${number(held)} slots`, html("small", {}, `of ${number(budget)}${waits}`));
  byId("evicted").replaceChildren(`${number(evicted)} tokens`, html("small", {}, `of ${number(tokens.length)} read, by an average head`));
  byId("cap").replaceChildren(bytes(found.cap_bytes), html("small", {}, `${bytes(found.bytes)} in use`));
  byId("takes").textContent = ` in ${bytes(found.cap_bytes)}`;
  show(["slots", "figures"]);
  strip.show(found);
}

function fill(share) {
  for (const id of ["slots", "gauge"]) byId(id).value = Math.min(1, share);
}

function forgetMemory() {
  fill(0);
  byId("takes").textContent = "";
  show(["slots", "figures"], false);
  byId("strip-none").textContent = now.messages.length
    ? "The server does not have this conversation at hand. It is shown here again after the next answer."
    : "Once there is an answer, every word of the conversation is shown here: the stronger its colour, the more of the model remembers it.";
  strip.show(null);
}

// The conversations

function showList() {
  const item = (one) => {
    const shown = one.id === now.id, title = store.titled(one), busy = answerIn(one.id) !== undefined;
    const open = html("button", { type: "button", class: "open", "aria-current": shown ? "true" : null, title, dir: "auto" },
      html("span", { class: "name" }, title), busy && html("span", { class: "unseen" }, ", being answered"));
    open.addEventListener("click", () => choose(store.find(one.id) ?? one));
    const drop = html("button", { type: "button", class: "delete", "aria-label": `Delete “${title}”`, title: "Delete" }, "✕");
    drop.addEventListener("click", () => remove(one.id));
    return html("li", { class: `${shown ? "current" : ""}${busy ? " busy" : ""}` }, open, drop);
  };
  const all = store.all(), found = store.holding(all, byId("find").value);
  byId("list").replaceChildren(...found.map(item));
  show("none-found", all.length > 0 && found.length === 0);
  showFull();
}

/** Tell of conversations that are lost with this tab, as the browser has no room for them. */
function showFull() {
  const lost = store.onlyHere(), text = `This browser has no room left: ${lost.length === 1
    ? `“${store.titled(lost[0])}” is` : `${number(lost.length)} conversations are`} lost when this tab is closed or loaded again. ` +
    "Delete others to make room, or export.";
  show("full", lost.length > 0);
  if (byId("full-text").textContent !== text) byId("full-text").textContent = text; // it is read out once
}

byId("full-export").addEventListener("click", () => exportJson("conversations", store.onlyHere()));
addEventListener("beforeunload", (event) => {
  if (store.onlyHere().length) event.preventDefault(); // the browser asks
});

function choose(conversation) {
  endEdit();
  now = conversation;
  store.current.set(now.id);
  tell(answerIn(now.id)?.begun === false ? READING : "");
  trouble(null);
  closePanels();
  showConversation();
  forgetMemory();
  refresh().catch(() => {}); // it was not asked for; an answer will tell of what is wrong
  focusText();
}

function remove(id) {
  answerIn(id)?.keepHalf();
  answerIn(id)?.stop();
  const gone = store.find(id);
  store.drop(id);
  if (id === now.id) choose(store.begun());
  else showList();
  tell("The conversation is deleted in this browser.", "Undo", () => {
    store.keep(gone);
    choose(gone);
  });
}

/** Say something below the conversation, perhaps with something to do about it. */
function tell(text, label = null, act = null) {
  const button = label && html("button", { type: "button", class: "small" }, label);
  button?.addEventListener("click", act);
  const followed = atEnd();
  byId("notice").replaceChildren(...[text, button].filter(Boolean));
  follow(followed); // it may have taken room
}

/** Change the conversation in sight, as it is by now: another tab may have changed it. */
function change(how) {
  now = store.find(now.id) ?? now;
  how(now);
  if (now.messages.length) store.keep(now);
  showFull();
}

byId("find").addEventListener("input", showList);
byId("about-open").addEventListener("click", () => askAbout(() => store.find(now.id) ?? now, (title, settings) => {
  store.settings.set(settings);
  const other = JSON.stringify(settings) !== JSON.stringify(now.settings);
  change((found) => Object.assign(found, { title, settings }));
  showConversation(false);
  if (other && now.messages.length) tell("From the next message on; with another system prompt the conversation is read again.");
}));
byId("new").addEventListener("click", () => choose(store.begun()));
store.watch((id) => {
  showList();
  if (answerIn(now.id) || (id !== null && id !== now.id)) return;
  now = store.find(now.id) ?? now; // one that was deleted stays in sight
  showConversation(false);
  refresh().catch(() => {});
});

// What was said

function showConversation(toEnd = true) {
  const one = answerIn(now.id), messages = one?.earlier ?? now.messages, last = messages.length - 1;
  byId("title").textContent = store.titled(now);
  document.title = messages.length ? `${store.titled(now)} – kvcap` : "kvcap";
  const focused = byId("log").contains(document.activeElement) ? placeOf(document.activeElement) : null;
  const acts = (i) => ({ pin: () => pin(i), ...(!one && { edit: () => edit(i) }), ...(i === last && !one && { again: repeat, goOn }) });
  byId("log").replaceChildren(...messages.map((message, i) => turn(message, now.pins.includes(i), acts(i))));
  live = one?.asked ? { one, turn: new LiveTurn(), frame: 0 } : null;
  if (live) {
    byId("log").append(live.turn.element);
    draw();
  }
  show("log", messages.length > 0);
  show("empty", messages.length === 0);
  show("send", !one);
  show("stop", one !== undefined);
  follow(toEnd);
  showList();
  focused?.().focus({ preventScroll: true });
}

/** Where in which message an element is; it may be made anew. */
function placeOf(element) {
  const turns = [...byId("log").children], index = turns.findIndex((one) => one.contains(element));
  const within = (one) => [...(one?.querySelectorAll("button, summary, pre, a, .wide") ?? [])];
  const place = within(turns[index]).indexOf(element);
  return () => within(byId("log").children[index])[place] ?? byId("log");
}

function draw() {
  live.frame = 0;
  live.turn.update(live.one.message, live.one.begun ? null : live.one.progress);
  follow();
}

/** Keep the end in sight, if it was, or `always`; offer to go there where it is not. */
function follow(always = false) {
  const log = byId("log");
  if (always || atEnd()) log.scrollTop = log.scrollHeight;
  show("to-end", !atEnd());
}

function atEnd() {
  const { scrollHeight, clientHeight, scrollTop } = byId("log");
  return scrollHeight - clientHeight - scrollTop < NEAR;
}

byId("log").addEventListener("scroll", () => show("to-end", !atEnd()));
byId("to-end").addEventListener("click", () => {
  follow(true);
  byId("log").focus();
});

function pin(index) {
  const pinned = now.pins.includes(index);
  change((found) => {
    found.pins = pinned ? found.pins.filter((one) => one !== index) : [...found.pins, index].sort((a, b) => a - b);
  });
  showConversation(false);
  tell(pinned ? "No longer pinned, from the next message on; the conversation is read again with it."
    : "Pinned from the next message on; the conversation is read again with it.");
}

// Answers

/**
 * Answer the conversation in sight; whichever is in sight by then, the answer goes on in this one.
 * @param {(messages: object[]) => object[]} ask gives what to answer, of the messages kept by then
 * @param {() => void} takeBack is called where nothing comes of it
 * @param {() => void} again tries once more
 */
async function answer(ask, takeBack, again) {
  if (!model || answerIn(now.id)) return;
  const one = new Answer(now, ask), seen = () => one.id === now.id;
  store.current.set(now.id);
  const writing = one.write(api, model, () => hear(one), seen);
  trouble(null);
  tell(READING);
  byId("spoken").textContent = "Answering";
  showConversation();
  const where = await writing;
  if (seen()) {
    now = store.find(one.id) ?? { ...now, messages: [], pins: [] };
    showConversation();
    tell(one.empty && !one.failed ? "Stopped before there was an answer; the message is taken back." : "");
    if (one.empty) takeBack();
    if (one.replaced) tell("What was said before from here on is replaced.", "Undo", () => undo(one.replaced));
    byId("spoken").textContent = parted(one.message).text || "There is no answer";
    if (one.failed) refused(one.failed, one.empty ? again : null);
    else refresh().then(keepRecalled).catch((error) => refused(error, greet));
    if (document.activeElement === document.body) focusText(); // the button that had it is gone
  } else showList();
  const found = where && store.find(where);
  if (where === null && one.reason !== "stopped") tell("The conversation was deleted while it was answered.");
  else if (found && where !== one.id) {
    tell("Another tab has gone on with this conversation; the answer is kept in a conversation of its own.", "Open it", () => choose(found));
  } else if (found && !seen() && one.reason !== "stopped") {
    const title = `“${store.titled(found)}”`;
    tell(one.failed ? `${title}: ${one.failed.message}.` : `${title} is answered.`, "Open it", () => choose(found));
  }
}

/** Go back to the messages and pins there were. */
function undo(former) {
  if (answerIn(now.id)) return;
  change((found) => Object.assign(found, former));
  tell("");
  showConversation();
}

/** Show what is new of an answer, if it is in sight. */
function hear(one) {
  if (one.id !== now.id) return;
  if (live?.one !== one) showConversation();
  else live.frame ||= requestAnimationFrame(() => live?.one === one && draw());
  if ((one.begun || one.progress) && byId("notice").textContent === READING) tell("");
}

/** Send a message; one that was never answered is sent with it. */
function send(text) {
  answer((messages) => {
    const left = messages.at(-1)?.role === "user" ? messages.at(-1).content : null;
    return left === null ? [...messages, { role: "user", content: text }]
      : [...messages.slice(0, -1), { role: "user", content: `${left}\n\n${text}` }];
  }, () => {
    draft.text ||= text;
  }, () => byId("form").requestSubmit());
}

/** Write a message of the user's anew, in the place of the next one. */
function edit(index) {
  const { content } = now.messages[index];
  editing = { index, content, draft: editing?.draft ?? draft.text };
  draft.text = content;
  byId("text").focus();
  tell("Send the message as it is to be; what follows it is answered anew.", "Keep it as it was", endEdit);
}

function endEdit() {
  if (!editing) return false;
  draft.text = editing.draft;
  editing = null;
  tell("");
  return true;
}

/** Send a message in the place of an earlier one and all that follows. */
function sendEdited({ index, content }, text) {
  answer((messages) => {
    if (messages[index]?.content !== content) throw new Error("another tab has changed the conversation");
    return [...messages.slice(0, index), { role: "user", content: text }];
  }, () => {
    const same = now.messages[index]?.content === content, left = draft.text;
    if (same) edit(index);
    draft.text = same || !left ? text : `${left}\n\n${text}`;
  }, () => byId("form").requestSubmit());
}

/** Answer the last message, perhaps again. */
function repeat() {
  answer((messages) => messages.slice(0, messages.findLastIndex(({ role }) => role === "user") + 1), () => {}, repeat);
}

/** Go on with the last answer, which ended before its time. */
function goOn() {
  answer((messages) => messages, () => {}, goOn);
}

/** Where a focus opens no keyboard over the screen. */
function focusText() {
  if (matchMedia("(hover: hover)").matches && !byId("key-dialog").open) byId("text").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const { text } = draft;
  if (answerIn(now.id) || !text.trim()) return;
  if (!model) return greet(); // the text stays where it is
  const edited = editing;
  draft.text = editing?.draft ?? "";
  editing = null;
  if (edited) sendEdited(edited, text);
  else send(text);
});
byId("example").addEventListener("click", ({ target }) => send(target.textContent));
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
if (!CSS.supports("field-sizing", "content")) {
  byId("text").addEventListener("input", ({ target }) => {
    target.rows = Math.min(8, target.value.split("\n").length);
  });
}
byId("stop").addEventListener("click", () => answerIn(now.id)?.stop());
addEventListener("pagehide", keepAll);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!closePanels() && !endEdit()) answerIn(now.id)?.stop();
});

now = store.find(store.current.get()) ?? now;
showConversation();
forgetMemory();
greet();
