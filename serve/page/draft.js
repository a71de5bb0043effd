// The message that is being written: what is typed, and above it long texts that were pasted. A text
// field would lay these out anew with every letter, which takes seconds for a megabyte.

import { byId, html, number } from "./dom.js";

const LONG = 20_000; // letters; a field shows fewer without delay
const SHORT = 1_000; // letters of a last paragraph that can be typed on

const field = byId("text");
let pasted = []; // long texts, in order

export const draft = {
  /** The whole message: what was pasted, and behind it what was typed. */
  get text() { return [...pasted, field.value].filter((text) => text.trim()).join("\n\n"); },
  /** A message to be written on; of a long one its last paragraph can be, where that is short. */
  set text(given) {
    const end = given.length > LONG ? given.lastIndexOf("\n\n") : -1, typed = given.slice(end + 2);
    const parts = given.length <= LONG ? [null, given] : end < 0 || typed.length > SHORT ? [given, ""] : [given.slice(0, end), typed];
    pasted = parts[0] === null ? [] : [parts[0]];
    field.value = parts[1];
    show();
  },
};

function show() {
  byId("pasted").replaceChildren(...pasted.map((text, i) => {
    const drop = html("button", { type: "button", class: "icon", "aria-label": "Remove the pasted text" }, "✕");
    drop.addEventListener("click", () => {
      pasted.splice(i, 1);
      show();
      field.focus();
    });
    const name = html("span", { dir: "auto" }, `“${text.slice(0, 80).trim().replace(/\s+/g, " ")}…”`);
    return html("li", {}, name, html("small", {}, `${number(text.length)} letters`), drop);
  }));
}

field.addEventListener("beforeinput", (event) => { // what is pasted or dropped
  const text = event.data ?? event.dataTransfer?.getData("text/plain") ?? "";
  if (text.length <= LONG || !event.inputType.startsWith("insertFrom")) return;
  event.preventDefault();
  pasted.push(text);
  show();
});
