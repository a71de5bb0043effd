// The strip: every token of a conversation, and how many heads of which layers hold it. As in the
// report of `kvcap report`; tokens are only made anew where the conversation is another one.

import { byId, html, number } from "./dom.js";

const STEPS = 5; // of colour
const BLOCK = 512, LINES = 64; // tokens of a block at most, and where it may end with a line
const SLICE = 4_000; // tokens that are made in one go, so that the page stays awake
const GUIDE = "Point at a token, or move with the arrow keys, to see which layers hold it.";
const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20 };

const visible = (piece) =>
  piece === null ? "▢" : piece.replace(/\t/g, "→\t").replace(/\n/g, "↵\n") || "·";
function spoken(piece) {
  if (piece === null) return "an unknown token";
  if (piece.trim()) return piece.trim();
  return piece.includes("\n") ? "new line" : piece ? "space" : "part of a character";
}
const step = (count, all) => (count === 0 ? 0 : Math.ceil((STEPS * count) / all));
/** Whether each of so many tokens lies in one of the spans. */
function within(spans, count) {
  const found = new Array(count).fill(false);
  for (const [start, stop] of spans) found.fill(true, start, stop);
  return found;
}
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** A group's layers in words: `layer 3`, `layers 4–7`, or each where they are no neighbours. */
function named({ layers, capped }) {
  const [first, last] = [layers[0], layers.at(-1)];
  const words = layers.length === 1 ? `layer ${first}`
    : last - first === layers.length - 1 ? `layers ${first}–${last}` : `layers ${layers.join(", ")}`;
  return capped ? words : `windows of ${words}`;
}

export class Strip {
  #data = null; // as the server gave it
  #spans = []; // of each token
  #shades = []; // the class each has
  #counts = []; // how many of the chosen heads hold each
  #all = 0; // the chosen heads
  #pinned = []; // whether each is
  #recalled = []; // whether each is evicted text that was read again
  #here = -1; // the token that is pointed at

  constructor() {
    this.box = byId("strip");
    byId("group").addEventListener("change", () => this.#draw());
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.box.addEventListener("focus", () => this.#point(Math.max(this.#here, 0), true));
    const under = ({ target }) => {
      const span = target.closest("#strip .token");
      if (span) this.#point(Number(span.id.slice(6)));
    };
    this.box.addEventListener("pointerover", under);
    this.box.addEventListener("click", under);
  }

  /** Show a strip, or none. */
  show(data) {
    const begins = this.#data !== null && data !== null && data.session_id === this.#data.session_id &&
      this.#data.tokens.every((token, i) => token === data.tokens[i]);
    if (!begins) this.#forget();
    this.#data = data;
    byId("strip-shown").hidden = !data?.tokens.length;
    byId("strip-none").hidden = Boolean(data?.tokens.length);
    if (!data?.tokens.length) return;
    this.#pinned = within(data.pinned, data.tokens.length);
    this.#recalled = within(data.recalled, data.tokens.length);
    this.#offer();
    this.#draw();
    this.#grow(data);
  }

  /** Make the tokens that are not there yet, a slice after the other, while this strip is shown. */
  #grow(data) {
    const from = this.#spans.length;
    if (data !== this.#data || from === data.tokens.length) return;
    const made = data.tokens.slice(from, from + SLICE).map((piece, i) =>
      html("span", { id: `token-${from + i}`, role: "option", "aria-selected": "false",
        "aria-label": piece?.trim() ? null : spoken(piece) }, visible(piece)));
    this.#spans.push(...made);
    this.#shade(from);
    const follows = this.box.scrollHeight - this.box.clientHeight - this.box.scrollTop < 40;
    this.#append(made);
    if (follows) this.box.scrollTop = this.box.scrollHeight;
    setTimeout(() => this.#grow(data));
  }

  /** In blocks, of which only those in sight are laid out: a conversation may be long. */
  #append(made) {
    let block = this.box.lastElementChild;
    for (const span of made) {
      const count = block?.childElementCount ?? BLOCK, last = block?.lastElementChild?.textContent ?? "";
      if (count >= BLOCK || (count >= LINES && last.endsWith("\n"))) {
        block = html("div", { role: "presentation" });
        this.box.append(block);
      }
      block.append(span);
    }
  }

  #forget() {
    this.box.replaceChildren();
    this.box.removeAttribute("aria-activedescendant");
    [this.#spans, this.#shades, this.#here] = [[], [], -1];
    byId("said").textContent = GUIDE;
    byId("layers").replaceChildren();
  }

  #offer() {
    const select = byId("group"), { groups } = this.#data, labels = groups.map(named);
    const every = groups.every(({ capped }) => capped) ? "all layers" : "all capped layers";
    if (select.length === groups.length + 1 && labels.every((label, i) => select[i + 1].text === label)) return;
    select.replaceChildren(...[every, ...labels].map((label, i) => new Option(label, String(i - 1))));
  }

  get #chosen() {
    const { groups } = this.#data, index = Number(byId("group").value);
    return index < 0 ? groups.filter(({ capped }) => capped) : [groups[index]];
  }

  #draw() {
    const chosen = this.#chosen, { tokens } = this.#data;
    this.#all = sum(chosen.map(({ heads }) => heads));
    this.#counts = tokens.map((_, i) => sum(chosen.map(({ held }) => held[i])));
    this.#shade(0);
    const held = this.#counts.filter((count) => count > 0).length;
    const pins = this.#pinned.filter(Boolean).length, again = this.#recalled.filter(Boolean).length;
    const where = byId("group").value === "-1" ? null : named(chosen[0]);
    const alike = this.#counts.every((count) => count === 0 || count === this.#all);
    const by = alike ? `every head${where ? ` of ${where}` : ""}` : `at least one head of ${where ?? "any layer"}`;
    byId("summary").textContent =
      (alike ? "" : "Every head keeps tokens of its own, so a token that one has evicted may be held by another: ") +
      `${number(held)} of ${number(tokens.length)} tokens are held by ${by}` +
      `${pins ? `, ${number(pins)} are pinned` : ""}${again ? `, ${number(again)} are recalled text` : ""}.`;
    this.#describe();
  }

  /** Give the tokens from `from` on, as far as they are made, the classes that they have by now. */
  #shade(from) {
    for (let i = from; i < this.#spans.length; i += 1) {
      const marks = `${this.#pinned[i] ? " pinned" : ""}${this.#recalled[i] ? " recalled" : ""}`;
      const shade = `token s${step(this.#counts[i], this.#all)}${marks}`;
      if (this.#shades[i] === shade) continue;
      this.#spans[i].className = `${shade}${i === this.#here ? " here" : ""}`;
      this.#shades[i] = shade;
    }
  }

  #describe() {
    const i = this.#here;
    if (i < 0) return;
    const piece = this.#data.tokens[i], count = this.#counts[i];
    const pin = this.#pinned[i] ? "; it is pinned" : i < this.#data.sinks ? "; the policy never evicts it" : "";
    const again = this.#recalled[i] ? "; it is evicted text that was read again" : "";
    const text = `“${spoken(piece)}”: ${count ? `held by ${count} of ${this.#all} heads` : "evicted"}${pin}${again}`;
    this.#spans[i].setAttribute("aria-label", text);
    byId("said").textContent = `Token ${number(i + 1)}, ${text}.`;
    byId("layers").replaceChildren(...this.#data.groups.map((group) =>
      html("li", { class: `s${step(group.held[i], group.heads)}` },
        `${named(group).replace(/layers? /, "")}: ${group.held[i]}/${group.heads}`)));
  }

  #point(i, scroll = false) {
    if (!this.#spans[i]) return;
    this.#mark("false", false);
    this.#here = i;
    this.#mark("true", true);
    this.box.setAttribute("aria-activedescendant", this.#spans[i].id);
    if (scroll) this.#spans[i].scrollIntoView({ block: "nearest" });
    this.#describe();
  }

  #mark(selected, here) {
    this.#spans[this.#here]?.classList.toggle("here", here);
    this.#spans[this.#here]?.setAttribute("aria-selected", selected);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.#spans.length - 1;
    let to;
    if (event.key in MOVES) to = this.#here + MOVES[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else return;
    event.preventDefault();
    this.#point(Math.min(Math.max(to, 0), last), true);
  }
}
