// What was said: a message with what can be done with it. Knows no conversations and no network.

import { html, number } from "./dom.js";
import { Growing } from "./markdown.js";

const ENDS = {
  length: "The answer has as many tokens as it may have.",
  stopped: "Stopped before its end.",
  broken: "The answer broke off before its end.",
};

/** Who says it, by which screen readers go from one to the next. */
const heading = (role) => html("h2", { class: "unseen" }, role === "user" ? "You" : "Answer");

/** An answer as it is written: `update` shows the message that it is so far. */
export class LiveTurn {
  #said = html("div", { class: "said writing", "aria-busy": "true" });
  #growing = new Growing(this.#said);
  element = html("article", { class: "turn assistant" }, heading("assistant"), this.#said);

  update({ content }) {
    this.#growing.update(content);
  }
}

/**
 * A message.
 * @param {object} message
 * @param {boolean} pinned
 * @param {object} acts what is offered, null where it is not: `pin` of a user's message; `again`
 *   and `goOn` of the last one
 */
export function turn(message, pinned, { pin, again, goOn }) {
  const { role, content, ended } = message, user = role === "user";
  const said = html("div", { class: "said", dir: user && "auto" });
  if (user) said.textContent = content;
  else new Growing(said).update(content);
  const tools = user
    ? [pinButton(pinned, pin), again && tool("Answer it", again)]
    : [tool("Copy", copied(content)), ended && content && goOn && tool("Continue", goOn), again && tool("Answer again", again), recalledFor(message)];
  return html("article", { class: `turn ${role}${user && pinned ? " pinned" : ""}` }, heading(role), said,
    ended && html("p", { class: "ended hint" }, ENDS[ended]), html("div", { class: "tools" }, ...tools));
}

function tool(text, act, attributes = {}) {
  const button = html("button", { type: "button", ...attributes }, text);
  button.addEventListener("click", act);
  return button;
}

const pinButton = (pinned, pin) =>
  tool(pinned ? "Pinned" : "Pin", pin, { "aria-pressed": String(pinned), title: "Its tokens are never evicted" });

const copied = (text) => async ({ currentTarget }) => {
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  currentTarget.textContent = done ? "Copied" : "Not allowed here";
};

/** How much evicted text was read again in front of the message that was answered; null where none was. */
function recalledFor({ took }) {
  const { passages = 0, recalled = 0 } = took ?? {};
  if (!recalled) return null;
  return html("span", { class: "recall-note" },
    `recalled ${number(passages)} passage${passages === 1 ? "" : "s"}, ${number(recalled)} tokens`);
}
