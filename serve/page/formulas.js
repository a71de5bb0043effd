// Sets formulas, of TeX as MathML, by Temml, which makes elements and trusts no text with more. It is
// loaded when the first formula is shown; what it does not know stays as it was written.

import { html } from "./dom.js";

const LIMITS = { maxExpand: 200, maxSize: [20, 200] }; // of macros, and of rules and spaces in em and pt

/** An element with a formula: `tex` is what stands between the marks of `source`. */
export function formula(source, tex, display = false) {
  const element = html(display ? "div" : "span", { class: "formula" }, source);
  set(element, tex, display).catch(() => {}); // no TeX, or the server is gone
  return element;
}

async function set(element, tex, display) {
  const { default: temml } = await import("./vendor/temml/temml.js");
  const made = html("span");
  temml.render(tex, made, { displayMode: display, throwOnError: true, ...LIMITS });
  element.replaceChildren(...made.childNodes);
}
