// What was said: a message with what can be done with it. Knows no conversations and no network.

import { copyButton, html, number } from "./dom.js";
import { Growing } from "./markdown.js";
import { parted } from "./thoughts.js";

const ENDS = {
  length: "The answer has as many tokens as it may have.",
  stopped: "Stopped before its end.",
  broken: "The answer broke off before its end.",
};

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
  element = html("article", { class: "turn assistant" }, heading("assistant"), ...this.#shown.nodes);

  constructor() {
    this.#shown.said.classList.add("writing");
    this.#shown.said.setAttribute("aria-busy", "true");
  }

  update(message) {
    this.#shown.update(message, true);
  }
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
  const said = user ? [html("div", { class: "said", dir: "auto" }, content)] : new Said().update(message).nodes;
  const tools = user
    ? [pinButton(pinned, pin), edit && tool("Edit", edit), again && tool("Answer it", again)]
    : [copyButton(parted(message).text), ended && content && goOn && tool("Continue", goOn), again && tool("Answer again", again), tookFor(message)];
  return html("article", { class: `turn ${role}${user && pinned ? " pinned" : ""}` }, heading(role), ...said,
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
