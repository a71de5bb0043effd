// What was said: a message with what can be done with it. Knows no conversations and no network.

import { copyButton, duration, html, number } from "./dom.js";
import { Growing } from "./markdown.js";
import { parted } from "./thoughts.js";

const ENDS = {
  length: "The answer has as many tokens as it may have.",
  stopped: "Stopped before its end.",
  broken: "The answer broke off before its end.",
};

const FOLDED = { letters: 400, lines: 8 }; // of a message of the user's, of which more is folded
const SOON = 2_000; // milliseconds, from which it is told how long reading takes
const PIECE = 4_000; // letters that are laid out together, once they are in sight

/** Who says it, by which screen readers go from one to the next. */
const heading = (role) => html("h2", { class: "unseen" }, role === "user" ? "You" : "Answer");

/** What an answer says, and folded above it what the model thought. */
class Said {
  #thinking = html("summary", {});
  #thoughts = html("div", { class: "thought prose" });
  #folded = html("details", { class: "thoughts", hidden: true }, this.#thinking, this.#thoughts);
  #growing = [new Growing(this.#thoughts)];
  said = html("div", { class: "said prose" });
  nodes = [this.#folded, this.said];

  constructor() {
    this.#growing.push(new Growing(this.said));
  }

  update(message, writing = false) {
    const { thoughts, text } = parted(message);
    this.#folded.hidden = !thoughts;
    this.#thinking.textContent = writing && !text ? "Thinking …" : "Thoughts";
    [thoughts, text].forEach((one, i) => this.#growing[i].update(one));
    return this;
  }
}

/** An answer as it is written: `update` shows the message that it is so far. */
export class LiveTurn {
  #shown = new Said();
  #bar = html("progress", { max: 1, value: 0, "aria-label": "Read so far" });
  #read = html("p", {});
  #reading = html("div", { class: "reading hint", hidden: true }, this.#read, this.#bar);
  element = html("article", { class: "turn assistant" }, heading("assistant"), this.#reading, ...this.#shown.nodes);

  constructor() {
    this.#shown.said.classList.add("writing");
    this.#shown.said.setAttribute("aria-busy", "true");
  }

  /** @param {object | null} progress how far what was said is read; null where that is not to be shown */
  update(message, progress) {
    this.#shown.update(message, true);
    this.#shown.said.hidden = progress !== null;
    this.#reading.hidden = progress === null;
    if (progress === null) return;
    const { total, cache, processed, time_ms: time } = progress;
    const left = time > SOON && processed > cache ? time * (total - processed) / (processed - cache) : 0;
    this.#bar.value = processed / total;
    this.#read.textContent = `Reading: ${number(processed)} of ${number(total)} tokens${left > SOON ? `, about ${duration(left)} left` : ""}`;
  }
}

/** The place, or the one before it where it lies within a letter of two units. */
const between = (text, at) => at - Number(/[\uDC00-\uDFFF]/.test(text[at] ?? ""));

/** Where the beginning of a long message ends that is shown of it; null where it is not long. */
function fold(content) {
  let end = -1;
  for (let i = 0; i < FOLDED.lines; i += 1) {
    end = content.indexOf("\n", end + 1);
    if (end < 0 || end > FOLDED.letters) break;
  }
  const stop = end < 0 || end > FOLDED.letters ? between(content, FOLDED.letters) : end;
  const rest = content.slice(stop).trim();
  return rest.length > FOLDED.letters / 2 || rest.split("\n").length > FOLDED.lines / 2 ? stop : null;
}

/** A long text in pieces that end with a line or a word, of which only those in sight are laid out. */
function pieces(content) {
  const found = [];
  for (let i = 0; i < content.length;) {
    const part = content.slice(i, i + PIECE), at = [part.lastIndexOf("\n"), part.lastIndexOf(" ")].find((one) => one >= 0);
    const stop = i + PIECE >= content.length ? content.length : at === undefined ? between(content, i + PIECE) : i + at + 1;
    found.push(html("div", { class: "piece" }, content.slice(i, stop).replace(/\n$/, "")));
    i = stop;
  }
  return found;
}

/** What the user says, and what unfolds it where it is long. */
function own(content) {
  const stop = fold(content), said = html("div", { class: "said", dir: "auto" });
  if (stop === null) {
    said.append(content);
    return { said };
  }
  const more = html("button", { type: "button" });
  const show = (all) => {
    said.replaceChildren(...(all ? pieces(content) : [`${content.slice(0, stop).trimEnd()} …`]));
    more.textContent = all ? "Show less" : `Show all ${number(content.length)} letters`;
    more.setAttribute("aria-expanded", String(all));
  };
  more.addEventListener("click", () => show(more.getAttribute("aria-expanded") === "false"));
  show(false);
  return { said, more };
}

/**
 * A message.
 * @param {object} message
 * @param {boolean} pinned
 * @param {object} acts what is offered, null where it is not: `pin` and `edit` of a user's message;
 *   `again` and `goOn` of the last one
 */
export function turn(message, pinned, { pin, edit, again, goOn }) {
  const { role, content, ended } = message, user = role === "user";
  const { said, more } = user ? own(content) : {};
  const tools = user
    ? [more, pinButton(pinned, pin), edit && tool("Edit", edit), again && tool("Answer it", again)]
    : [copyButton(parted(message).text), ended && content && goOn && tool("Continue", goOn), again && tool("Answer again", again), tookFor(message)];
  return html("article", { class: `turn ${role}${user && pinned ? " pinned" : ""}` }, heading(role), ...(user ? [said] : new Said().update(message).nodes),
    ended && html("p", { class: "ended hint" }, ENDS[ended]), recalledFor(message), html("div", { class: "tools" }, ...tools));
}

function tool(text, act, attributes = {}) {
  const button = html("button", { type: "button", ...attributes }, text);
  button.addEventListener("click", act);
  return button;
}

const pinButton = (pinned, pin) =>
  tool(pinned ? "Pinned" : "Pin", pin, { "aria-pressed": String(pinned), title: "Its tokens are never evicted" });

/** How many tokens an answer has, and how fast they came; null where that is not known. */
function tookFor({ took }) {
  const { tokens, speed } = took ?? {};
  if (!tokens) return null;
  const fast = speed && `, ${number(Number(speed.toPrecision(2)))} a second`;
  return html("span", { class: "note" }, `${number(tokens)} token${tokens === 1 ? "" : "s"}${fast || ""}`);
}

/** How much evicted text was read again in front of the message that was answered; null where none was. */
function recalledFor({ took }) {
  const { passages = 0, recalled = 0, texts } = took ?? {};
  if (!recalled) return null;
  const note = `recalled ${number(passages)} passage${passages === 1 ? "" : "s"}, ${number(recalled)} tokens`;
  if (!texts) return html("p", { class: "recall-note" }, note);
  return html("details", { class: "recalled-texts" }, html("summary", { class: "recall-note" }, note),
    ...texts.map((text) => html("p", { dir: "auto" }, text)));
}
