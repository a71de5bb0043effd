// The chat page: what it shows when. Conversations lie in `store.js`, the network in `api.js`.

import { Api } from "./api.js";
import { byId, bytes, html, number, show } from "./dom.js";
import { Growing } from "./markdown.js";
import * as store from "./store.js";
import { Strip } from "./strip.js";

const NEAR = 120; // pixels from the end within which what is written is followed
const ENDS = {
  length: "The answer has as many tokens as it may have.",
  stopped: "Stopped. The answer so far stays in the conversation.",
};
const WHY_KEY = "It was started with an API key. The key stays in this tab until it is closed, and is sent to this server alone.";

const api = new Api(store.apiKey.get), strip = new Strip();
let now = store.begun(); // the conversation that is shown
let model = null; // its name for the API
let writing = null; // the answer that is being written: {stop, conversation, text}

// The server, its model and its key

/** Ask the server for its model, and for a key where it wants one. */
async function greet() {
  try {
    const { policy, budget_tokens: budget, ...found } = await api.facts();
    model = found.model;
    byId("lead").textContent = `${model.split("/").at(-1)}: ${policy} keeps ${number(budget)} slots`;
    byId("policy").replaceChildren(policy, html("small", {}, `budget ${number(budget)} slots`));
    trouble(null);
    await refresh();
  } catch (error) {
    byId("lead").textContent = "";
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

/** Show what the server holds of the conversation in sight. */
async function refresh() {
  const { id, messages } = now;
  const found = messages.length ? await api.strip(id) : null;
  if (id !== now.id) return; // another one is in sight by now
  if (found) showMemory(found);
  else forgetMemory();
}

function showMemory(found) {
  const { budget_tokens: budget, held, waiting, evicted, tokens } = found;
  fill(held / budget);
  const waits = waiting ? ` + ${number(waiting)} waiting for the next eviction` : "";
  byId("held").replaceChildren(`${number(held)} slots`, html("small", {}, `of ${number(budget)}${waits}`));
  byId("evicted").replaceChildren(`${number(evicted)} tokens`, html("small", {}, `of ${number(tokens.length)} read`));
  byId("cap").replaceChildren(bytes(found.cap_bytes), html("small", {}, `${bytes(found.bytes)} in use`));
  strip.show(found);
}

function fill(share) {
  for (const id of ["slots", "gauge"]) byId(id).value = Math.min(1, share);
}

function forgetMemory() {
  fill(0);
  for (const id of ["held", "evicted", "cap"]) byId(id).textContent = "–";
  byId("strip-none").textContent = now.messages.length
    ? "The server does not have this conversation at hand. It is shown here again after the next answer."
    : "Once there is an answer, every token of the conversation is shown here: the stronger its colour, the more heads hold it.";
  strip.show(null);
}

// The conversations

function showList() {
  const item = (one) => {
    const shown = one.id === now.id, title = store.titled(one);
    const open = html("button", { type: "button", class: "open", "aria-current": shown ? "true" : null, title }, title);
    open.addEventListener("click", () => choose(store.find(one.id) ?? one));
    const drop = html("button", { type: "button", class: "delete", "aria-label": `Delete “${title}”`, title: "Delete" }, "✕");
    drop.addEventListener("click", () => remove(one.id));
    return html("li", { class: shown ? "current" : null }, open, drop);
  };
  byId("list").replaceChildren(...store.all().map(item));
}

function choose(conversation) {
  writing?.stop();
  now = conversation;
  store.current.set(now.id);
  byId("notice").textContent = "";
  trouble(null);
  closePanels();
  showConversation();
  forgetMemory();
  refresh().catch(() => {}); // it was not asked for; an answer will tell of what is wrong
  focusText();
}

function remove(id) {
  const gone = store.find(id);
  if (writing?.conversation.id === id) writing.stop();
  store.drop(id);
  if (id === now.id) choose(store.begun());
  else showList();
  const undo = html("button", { type: "button", class: "small" }, "Undo");
  undo.addEventListener("click", () => {
    keep(gone);
    choose(gone);
  });
  byId("notice").replaceChildren("The conversation is deleted in this browser.", undo);
}

function keep(conversation) {
  if (!store.keep(conversation)) {
    byId("notice").textContent = "This browser has no room for more conversations; delete some to keep this one.";
  }
}

byId("new").addEventListener("click", () => choose(store.begun()));
addEventListener("storage", ({ key }) => {
  if (store.concerns(key)) showList();
});

// What was said

function showConversation() {
  byId("title").textContent = store.titled(now);
  document.title = now.messages.length ? `${store.titled(now)} – kvcap` : "kvcap";
  byId("log").replaceChildren(...now.messages.map((_, i) => turn(i)));
  show("log", now.messages.length > 0);
  show("empty", now.messages.length === 0);
  follow(true);
  showList();
}

/** A message with what can be done with it. */
function turn(index) {
  const { role, content } = now.messages[index];
  const said = html("div", { class: "said" }), last = index === now.messages.length - 1;
  const article = html("article", { class: `turn ${role}`, "aria-label": role === "user" ? "You" : "Answer" }, said);
  if (role === "user") {
    said.textContent = content;
    article.append(html("div", { class: "tools" }, pinButton(index, article)));
    if (last && !writing) article.lastChild.append(tool("Answer it", repeat));
  } else {
    new Growing(said).update(content);
    article.append(html("div", { class: "tools" }, tool("Copy", copy),
      last ? tool("Answer again", repeat) : null, recalledBefore(index)));
  }
  return article;

  async function copy({ currentTarget }) {
    const done = await navigator.clipboard?.writeText(content).then(() => true, () => false);
    currentTarget.textContent = done ? "Copied" : "Not allowed here";
  }
}

/** How much evicted text was read again in front of the message that was answered; null where none was. */
function recalledBefore(index) {
  const { passages = 0, tokens = 0 } = now.recalled?.[index] ?? {};
  if (!tokens) return null;
  return html("span", { class: "recall-note" },
    `recalled ${number(passages)} passage${passages === 1 ? "" : "s"}, ${number(tokens)} tokens`);
}

function tool(text, act) {
  const button = html("button", { type: "button" }, text);
  button.addEventListener("click", act);
  return button;
}

function pinButton(index, article) {
  const button = tool("", () => {
    const pinned = now.pins.includes(index);
    now.pins = pinned ? now.pins.filter((one) => one !== index) : [...now.pins, index].sort((a, b) => a - b);
    keep(now);
    draw();
    byId("notice").textContent = pinned
      ? "No longer pinned, from the next message on; the conversation is read again with it."
      : "Pinned from the next message on; the conversation is read again with it.";
  });
  const draw = () => {
    const pinned = now.pins.includes(index);
    button.setAttribute("aria-pressed", String(pinned));
    button.textContent = pinned ? "Pinned" : "Pin";
    button.title = "Its tokens are never evicted";
    article.classList.toggle("pinned", pinned);
  };
  draw();
  return button;
}

/** Keep the end in sight, if it was, or `always`. */
function follow(always = false) {
  const { scrollHeight, clientHeight, scrollTop } = byId("log");
  if (always || scrollHeight - clientHeight - scrollTop < NEAR) byId("log").scrollTop = scrollHeight;
}

// Answers

/**
 * Answer the conversation in sight with these messages, of which the last is the user's. Where
 * nothing comes of it the conversation is as it was, and `takeBack` is called.
 */
async function answer(messages, takeBack, again) {
  if (writing || !model) return;
  const conversation = now, before = now.messages, control = new AbortController();
  writing = { conversation, text: "", stop: () => control.abort() };
  Object.assign(now, { messages, changed: Date.now() });
  keep(now);
  store.current.set(now.id);
  working(true);
  trouble(null);
  byId("notice").textContent = "Reading …";
  byId("spoken").textContent = "Answering";
  showConversation();
  const said = html("div", { class: "said writing", "aria-busy": "true" }), growing = new Growing(said);
  byId("log").append(html("article", { class: "turn assistant", "aria-label": "Answer" }, said));
  follow(true);
  let frame = 0, reason = null, usage = null, failed = null;
  const draw = () => {
    frame = 0;
    growing.update(writing.text);
    follow();
  };
  try {
    ({ reason, usage } = await api.answer({ ...conversation, model }, control.signal, (piece) => {
      if (!writing.text) byId("notice").textContent = "";
      writing.text += piece;
      frame ||= requestAnimationFrame(draw);
    }));
  } catch (error) {
    if (control.signal.aborted) reason = "stopped";
    else failed = error;
  }
  cancelAnimationFrame(frame);
  const { text } = writing, seen = conversation.id === now.id;
  const nothing = !text && (failed !== null || reason === "stopped");
  writing = null;
  working(false);
  if (!nothing) {
    conversation.messages = [...messages, { role: "assistant", content: text }];
    conversation.recalled = { ...conversation.recalled,
      [messages.length]: { passages: usage?.recalled_passages, tokens: usage?.recalled } };
  }
  else if (seen) conversation.messages = before; // elsewhere the message waits to be answered
  conversation.pins = conversation.pins.filter((index) => index < conversation.messages.length);
  if (!conversation.messages.length) store.drop(conversation.id);
  else if (store.find(conversation.id)) keep(conversation); // it may have been deleted meanwhile
  if (!seen) return showList();
  showConversation();
  if (nothing) takeBack();
  byId("spoken").textContent = text || "There is no answer";
  byId("notice").textContent = nothing && !failed ? "Stopped before there was an answer; the message is taken back." : ENDS[reason] ?? "";
  if (failed) refused(failed, text ? null : again);
  else refresh().catch((error) => refused(error, greet));
  focusText();
}

/** Send a message; one that was never answered is sent with it. */
function send(text) {
  const left = now.messages.at(-1)?.role === "user" ? now.messages.at(-1).content : null;
  const said = left === null ? text : `${left}\n\n${text}`;
  const earlier = left === null ? now.messages : now.messages.slice(0, -1);
  const takeBack = () => {
    byId("text").value ||= text;
  };
  answer([...earlier, { role: "user", content: said }], takeBack, () => byId("form").requestSubmit());
}

/** Answer the last message, perhaps again. */
function repeat() {
  const last = now.messages.findLastIndex(({ role }) => role === "user");
  answer(now.messages.slice(0, last + 1), () => {}, repeat);
}

/** Where a focus opens no keyboard over the screen. */
function focusText() {
  if (matchMedia("(hover: hover)").matches && !byId("key-dialog").open) byId("text").focus();
}

function working(busy) {
  show("send", !busy);
  show("stop", busy);
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value;
  if (writing || !text.trim()) return;
  if (!model) return greet(); // the text stays where it is
  byId("text").value = "";
  send(text);
});
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
byId("stop").addEventListener("click", () => writing?.stop());

// What is written when the page goes is kept; the server ends an answer that nobody reads.
addEventListener("pagehide", () => {
  if (!writing?.text) return;
  const { conversation, text } = writing;
  store.keep({ ...conversation, messages: [...conversation.messages, { role: "assistant", content: text }] });
});

// The drawers of a narrow screen

const PANELS = ["list", "memory"];

function openPanel(name) {
  byId(`${name}-panel`).classList.add("open");
  byId(`${name}-open`).setAttribute("aria-expanded", "true");
  byId("main").inert = true;
  byId(`${name}-close`).focus();
}

/** Close what is open; whether anything was. */
function closePanels() {
  const open = PANELS.filter((name) => byId(`${name}-panel`).classList.contains("open"));
  byId("main").inert = false;
  for (const name of open) {
    byId(`${name}-panel`).classList.remove("open");
    byId(`${name}-open`).setAttribute("aria-expanded", "false");
    byId(`${name}-open`).focus();
  }
  return open.length > 0;
}

for (const name of PANELS) {
  byId(`${name}-open`).addEventListener("click", () => openPanel(name));
  byId(`${name}-close`).addEventListener("click", closePanels);
}
addEventListener("click", ({ target }) => { // beside a drawer
  if (target === document.documentElement || target === document.body) closePanels();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  if (!closePanels()) writing?.stop();
});
matchMedia("(max-width: 1100px)").addEventListener("change", closePanels);
matchMedia("(max-width: 760px)").addEventListener("change", closePanels);

now = store.find(store.current.get()) ?? now;
showConversation();
forgetMemory();
greet();
