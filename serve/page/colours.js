// Colours code by what its words are, by speed-highlight, which makes no markup but tells each piece
// and its kind. A language is loaded when code in it is first shown.

import { html } from "./dom.js";
import { tokenizer } from "./vendor/speed-highlight/tokenize.js";

const LONGEST = 6_000; // letters; longer code stays plain, as for some texts the time grows with the square
const LANGUAGES = new Set(("bash c css diff docker go html ini java js jsdoc json lua make pl py regex rs " +
  "sql todo toml ts xml yaml").split(" "));
const NAMES = {
  "c++": "c", cc: "c", cpp: "c", h: "c", hpp: "c", console: "bash", dockerfile: "docker", golang: "go",
  javascript: "js", jsonc: "json", jsx: "js", makefile: "make", mjs: "js", patch: "diff", perl: "pl", python: "py", python3: "py",
  rust: "rs", sh: "bash", shell: "bash", svg: "xml", tsx: "ts", typescript: "ts", yml: "yaml", zsh: "bash",
};

const load = async (name) => (await import(`./vendor/speed-highlight/languages/${name}.js`)).default;

/** Colour the code of an element, whose text stays the same; what is in no known language stays plain. */
export async function colour(element, language) {
  const written = language.toLowerCase(), name = NAMES[written] ?? written, text = element.textContent;
  if (!LANGUAGES.has(name) || text.length > LONGEST) return;
  const pieces = [];
  const steps = tokenizer(text, name, (piece, kind) => pieces.push(kind ? html("span", { class: `code-${kind}` }, piece) : piece));
  for (let step = steps.next(); !step.done;) {
    step = steps.next(LANGUAGES.has(step.value) ? await load(step.value) : undefined); // unknown within known is plain
  }
  element.replaceChildren(...pieces);
}
