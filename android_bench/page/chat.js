// The page that chats: what it shows when. The model runs in a worker; nothing is sent anywhere.

import { byId, html, show } from "./dom.js";

const worker = new Worker(new URL("chat-worker.js", import.meta.url), { type: "module" });
let settle, hear = () => {}, busy = false;

const number = (value) => value.toLocaleString("en");
const megabytes = (bytes) => `${(bytes / 1e6).toLocaleString("en", { maximumFractionDigits: bytes < 1e7 ? 2 : 0 })} MB`;

/** What the worker answers; meanwhile `listen` hears of its steps. One question at a time. */
function ask(verb, given, listen = () => {}) {
  hear = listen;
  return new Promise((resolve, reject) => {
    settle = { resolve, reject };
    worker.postMessage({ verb, given });
  });
}

worker.onmessage = ({ data }) => {
  if (data.event) hear(data.event);
  else if ("failed" in data) settle.reject(new Error(data.failed));
  else settle.resolve(data.found);
};
worker.onerror = (event) => {
  event.preventDefault();
  settle?.reject(new Error(event.message || "the part of the page that runs the model could not start"));
};

function trouble(title, text) {
  byId("trouble-title").textContent = title;
  byId("trouble-text").textContent = `${text}.`;
  show("trouble");
}

function showMeter({ slots, budget, seen, used, bytes }) {
  byId("slots").value = Math.min(1, slots / budget);
  const waits = slots > budget ? ` + ${number(slots - budget)} waiting for the next eviction` : "";
  byId("held").replaceChildren(`${number(Math.min(slots, budget))} slots`, html("small", {}, `of ${number(budget)}${waits}`));
  byId("evicted").replaceChildren(`${number(seen - slots)} evicted`, html("small", {}, `of ${number(seen)} read`));
  byId("bytes").replaceChildren(megabytes(used), html("small", {}, `never over ${megabytes(bytes)}`));
}

function showSpeed(tokens, ms, first) {
  if (tokens < 2) return;
  byId("speed").replaceChildren(`${(((tokens - 1) * 1000) / ms).toFixed(1)} tokens/s`,
    html("small", {}, `first after ${(first / 1000).toFixed(2)} s`));
}

/** How far the end of the conversation is below what is seen of it. */
function below() {
  const { scrollHeight, clientHeight, scrollTop } = byId("log");
  return scrollHeight - clientHeight - scrollTop;
}

function follow() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

function say(role, text) {
  const made = html("p", { class: `said ${role}` }, text);
  byId("log").append(made);
  follow();
  return made;
}

function working(now) {
  busy = now;
  show("send", !now);
  show("stop", now);
  byId("clear").disabled = now;
}

const ENDS = {
  length: "The answer has as many tokens as this model is told to write at most.",
  stopped: "Stopped. The answer so far stays in the conversation.",
  unread: "Stopped before the message was read; it is taken back, and the conversation is read again with the next one.",
};

async function send(text) {
  working(true);
  byId("notice").textContent = "";
  const mine = say("user", text), answer = say("assistant", "");
  answer.classList.add("writing");
  const start = performance.now();
  let begun = 0, tokens = 0;
  try {
    const found = await ask("say", { text }, ({ read, of, piece, meter }) => {
      showMeter(meter);
      if (piece === undefined) {
        byId("notice").textContent = read < of ? `Reading ${number(read)} of ${number(of)} tokens …` : "";
        return;
      }
      begun ||= performance.now();
      tokens += 1;
      answer.append(piece);
      showSpeed(tokens, performance.now() - begun, begun - start);
      if (below() < 160) follow();
    });
    showMeter(found.meter);
    byId("notice").textContent = ENDS[found.reason] ?? "";
    if (found.reason === "unread") {
      mine.remove();
      answer.remove();
      byId("text").value = text;
    }
  } catch (error) {
    answer.remove();
    trouble("The answer broke off", `${error.message}. What was read is forgotten and is read again with the next message`);
  }
  answer.classList.remove("writing");
  follow();
  working(false);
  byId("text").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value;
  if (busy || !text.trim()) return;
  byId("text").value = "";
  show("trouble", false);
  send(text);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("stop").addEventListener("click", () => worker.postMessage({ verb: "stop" }));
byId("clear").addEventListener("click", async () => {
  if (busy) return;
  showMeter((await ask("clear")).meter);
  byId("log").replaceChildren();
  byId("notice").textContent = "";
  byId("speed").textContent = "–";
  byId("text").focus();
});
byId("reload").addEventListener("click", () => location.reload());

async function begin() {
  try {
    const { facts, threads, meter } = await ask("load", {}, ({ loaded, of }) => {
      byId("bar").value = loaded / of;
      byId("loaded").textContent = `${megabytes(loaded)} of ${megabytes(of)}`;
    });
    const { model, policy, dtype, budget_tokens: budget } = facts;
    byId("title").textContent = model.name.split("/").at(-1);
    document.title = `${model.name.split("/").at(-1)}: chat on this device`;
    byId("lead").textContent = `${policy.name} keeps ${number(budget)} slots, weights in ${dtype}, ${threads} thread${threads > 1 ? "s" : ""}.`;
    showMeter(meter);
    show("loading", false);
    show(["meter", "log", "form"]);
    byId("text").focus();
  } catch (error) {
    show("loading", false);
    byId("lead").textContent = "";
    trouble("The model could not be loaded", error.message);
  }
}

begin();
