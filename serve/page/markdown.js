// Markdown as elements. Text only ever becomes text nodes, links lead to the web alone, images are
// links, and HTML is shown as it is written. Time grows with the length of the text, whatever it is.

import { colour } from "./colours.js";
import { copyButton, html } from "./dom.js";
import { formula } from "./formulas.js";

const FORMULA_LINES = 100;
const DEPTH = 12; // of lists, quotes and emphasis within each other; what is deeper stays text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const TASK = /^\[([ xX])\] +(?=\S)/;
const DISPLAY = /^ {0,3}(?:\$\$|\\\[)/;
const TABLE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Shows a text that grows: only those blocks of it are made anew that changed. */
export class Growing {
  #shown = [];

  constructor(element) {
    this.element = element;
  }

  update(text) {
    const found = leveled(blocks(text.split("\n"), 0));
    let same = 0;
    while (same < found.length && found[same].source === this.#shown[same]?.source) same += 1;
    for (const { node } of this.#shown.slice(same)) node.remove();
    for (const block of found.slice(same)) {
      block.node = block.make();
      block.node.dir ||= "auto"; // from right to left where it begins so
      this.element.append(block.node);
    }
    this.#shown = [...this.#shown.slice(0, same), ...found.slice(same)];
  }
}

/** Headings, below the page's own two, without leaving out a level between them. */
function leveled(found) {
  let last = 2;
  return found.map(({ source, make }) => {
    const marks = HEADING.exec(source)?.[1].length;
    if (!marks) return { source, make };
    const level = last = Math.min(6, marks + 2, last + 1);
    return { source: `${level} ${source}`, make: () => make(level) };
  });
}

const nodes = (lines, depth) => blocks(lines, depth).map(({ make }) => make());

/** The blocks of some lines: their source, and what makes an element of each. */
function blocks(lines, depth) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const [stop, make] = block(lines, i, depth);
    found.push({ source: lines.slice(i, stop).join("\n"), make });
    i = stop;
  }
  return found;
}

/** The block that begins at line `i`: the line behind it, and what makes its element. */
function block(lines, i, depth) {
  const line = lines[i];
  let match;
  if ((match = FENCE.exec(line))) return code(lines, i, match[1], match[2]);
  if ((match = HEADING.exec(line))) {
    const text = match[2]; // within a list or a quote it is no heading of the answer
    return [i + 1, (level) => (level ? html(`h${level}`, {}, ...inline(text)) : html("p", {}, html("strong", {}, ...inline(text))))];
  }
  if (RULE.test(line)) return [i + 1, () => html("hr")];
  const shown = DISPLAY.test(line) && display(lines, i);
  if (shown) return shown;
  if (depth < DEPTH && QUOTE.test(line)) {
    const stop = end(lines, i, (next) => QUOTE.test(next));
    const inner = lines.slice(i, stop).map((one) => one.replace(QUOTE, ""));
    return [stop, () => html("blockquote", {}, ...nodes(inner, depth + 1))];
  }
  if (depth < DEPTH && ITEM.test(line)) return list(lines, i, depth);
  if (line.includes("|") && lines[i + 1]?.includes("-") && TABLE.test(lines[i + 1])) return table(lines, i);
  const stop = end(lines, i, (next) => next.trim() && !interrupts(next, depth));
  return [stop, () => html("p", {}, ...broken(lines.slice(i, stop)))];
}

const interrupts = (line, depth) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || DISPLAY.test(line) ||
  (depth < DEPTH && (QUOTE.test(line) || /^ {0,3}(?:[-*+]|1[.)]) +\S/.test(line)));

/** The first line from `i + 1` on that does not belong. */
function end(lines, i, belongs) {
  let stop = i + 1;
  while (stop < lines.length && belongs(lines[stop])) stop += 1;
  return stop;
}

function code(lines, i, fence, language) {
  const closes = (line) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
  const stop = end(lines, i, (line) => !closes(line));
  const text = lines.slice(i + 1, stop).join("\n");
  return [Math.min(stop + 1, lines.length), () => {
    const shown = html("code", {}, text);
    colour(shown, language).catch(() => {}); // the server may be gone
    return html("div", { class: "code", dir: "ltr" }, copyButton(text, "Copy the code"),
      html("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code in ${language}` : "Code" }, shown));
  }];
}

/** A formula between `$$` or `\\[` and its end, alone on its lines; null where it is none. */
function display(lines, i) {
  const closing = lines[i].trimStart().startsWith("$$") ? "$$" : "\\]";
  for (let stop = i; stop < Math.min(i + FORMULA_LINES, lines.length); stop += 1) {
    const rest = (stop === i ? lines[i].trimStart().slice(2) : lines[stop]).trimEnd(), at = rest.indexOf(closing);
    if (at < 0) continue;
    if (at < rest.length - 2) return null; // a text goes on behind it
    const source = lines.slice(i, stop + 1).join("\n").trim();
    return [stop + 1, () => formula(source, source.slice(2, -2), true)];
  }
  return null;
}

/** A list goes on as long as lines are its items', or are indented below one. */
function list(lines, i, depth) {
  const ordered = (mark) => /\d/.test(mark), kind = ordered(ITEM.exec(lines[i])[2]);
  const items = [];
  let stop = i, indent = 0, blank = false;
  for (; stop < lines.length; stop += 1) {
    const line = lines[stop], match = ITEM.exec(line);
    const inside = items.length > 0 && line.search(/\S|$/) >= indent;
    if (!line.trim()) {
      blank = true;
      items.at(-1).lines.push("");
      continue;
    }
    if (match && !inside) {
      if (ordered(match[2]) !== kind || (items.length && RULE.test(line))) break;
      indent = match[1].length + match[2].length + Math.max(1, Math.min(4, match[3].length));
      items.push({ mark: match[2], lines: [line.slice(indent)] });
    } else if (inside) items.at(-1).lines.push(line.slice(indent));
    else if (blank || interrupts(line, depth)) break;
    else items.at(-1).lines.push(line.trimStart());
    blank = false;
  }
  const start = kind ? Number.parseInt(items[0].mark, 10) : 1;
  const item = ({ lines: inner }) => {
    const task = TASK.exec(inner[0]), done = task?.[1].trim() ? true : null;
    const made = nodes(task ? [inner[0].slice(task[0].length), ...inner.slice(1)] : inner, depth + 1);
    const lone = made.filter(({ tagName }) => tagName === "P").length === 1 && made[0].tagName === "P";
    const box = task && html("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "Done" : "To do" });
    return html("li", { class: task && "task" }, box, ...(lone ? [...made[0].childNodes, ...made.slice(1)] : made));
  };
  return [stop, () => html(kind ? "ol" : "ul", { start: start === 1 ? null : start }, ...items.map(item))];
}

function table(lines, i) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const stop = end(lines, i + 1, (line) => line.includes("|"));
  const sides = cells(lines[i + 1]).map((mark) => (/^:-+:$/.test(mark) ? "center" : mark.endsWith(":") ? "right" : null));
  const row = (line, name) => html("tr", {}, ...cells(line).slice(0, sides.length)
    .map((cell, at) => html(name, { class: sides[at], scope: name === "th" ? "col" : null }, ...inline(cell))));
  return [stop, () => html("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, html("table", {},
    html("thead", {}, row(lines[i], "th")),
    html("tbody", {}, ...lines.slice(i + 2, stop).map((line) => row(line, "td")))))];
}

/** Lines of a paragraph; each begins a line, as models mean it. */
const broken = (lines) => lines.flatMap((line, i) => [...(i ? [html("br")] : []), ...inline(line.trim())]);

const WRAPS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[!<h$]/g;
const FORMULA = /\$\$([^$]{1,1000})\$\$|\$(?!\s)([^$]{1,1000})(?<!\s)\$(?!\d)|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]/y;

/** The nodes of a line's text. */
function inline(text, depth = 0) {
  const found = [], dead = new Set(); // marks that nothing closes from here on
  let plain = "", i = 0;
  const add = (node) => {
    if (plain) found.push(document.createTextNode(plain));
    plain = "";
    found.push(node);
  };
  while (i < text.length) {
    SPECIAL.lastIndex = i;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(i, next);
    i = next;
    if (i === text.length) break;
    const step = depth < DEPTH ? special(text, i, depth, dead) : null;
    if (step === null) plain += text[i++];
    else if (typeof step.made === "string") {
      plain += step.made;
      i = step.stop;
    } else {
      add(step.made);
      i = step.stop;
    }
  }
  if (plain) found.push(document.createTextNode(plain));
  return found;
}

/** What stands at `i`, if it is more than a letter: a node or a text, and where it ends. */
function special(text, i, depth, dead) {
  const letter = text[i];
  FORMULA.lastIndex = i;
  const tex = letter === "$" || letter === "\\" ? FORMULA.exec(text) : null;
  if (tex) return { made: formula(tex[0], tex.slice(1).find(Boolean)), stop: FORMULA.lastIndex };
  if (letter === "$") return null;
  if (letter === "\\") return /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "") ? { made: text[i + 1], stop: i + 2 } : null;
  if (letter === "`") return span(text, i, dead);
  if (letter === "!" || letter === "[") return named(text, i, depth, dead);
  if (letter === "<" || letter === "h") return bare(text, i);
  for (const [mark, name] of WRAPS) {
    if (!text.startsWith(mark, i) || dead.has(mark)) continue;
    const from = i + mark.length, stop = closer(text, from, mark);
    if (stop < 0) dead.add(mark);
    else if (/\S/.test(text[from]) && !(mark[0] === "_" && /\w/.test(text[i - 1] ?? ""))) {
      return { made: html(name, {}, ...inline(text.slice(from, stop), depth + 1)), stop: stop + mark.length };
    }
  }
  const run = /^(.)\1*/.exec(text.slice(i, i + 64))[0]; // of marks that wrap nothing
  return { made: run, stop: i + run.length };
}

/** Where the next mark is that can close, or -1: not behind a space, and a single one is no double. */
function closer(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at + 1)) {
    const single = mark.length === 1, before = text[at - 1], after = text[at + mark.length];
    if (single && after === mark) {
      at += 1;
      continue;
    }
    if (/\s/.test(before) || before === "\\" || (mark[0] === "_" && /\w/.test(after ?? ""))) continue;
    return at;
  }
  return -1;
}

function span(text, i, dead) {
  const ticks = /^`+/.exec(text.slice(i, i + 64))[0];
  const stop = dead.has(ticks) ? -1 : text.indexOf(ticks, i + ticks.length);
  if (stop < 0) {
    dead.add(ticks);
    return { made: ticks, stop: i + ticks.length };
  }
  return { made: html("code", { dir: "ltr" }, text.slice(i + ticks.length, stop).replace(/^ (.*\S.*) $/, "$1")), stop: stop + ticks.length };
}

const NAMED = /!?\[((?:[^[\]\\]|\\.){0,1000})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:\s+["'][^"']{0,300}["'])?\s*\)/y;
const BARE = /<(https?:\/\/[^\s<>]{1,2000})>|(https?:\/\/[^\s<>"'`]{1,2000})/y;

function named(text, i, depth) {
  NAMED.lastIndex = i;
  const match = NAMED.exec(text);
  const address = match && safe(match[2]);
  if (!address) return null;
  const inner = match[1] ? inline(match[1].replace(/\\(.)/g, "$1"), DEPTH) : [document.createTextNode(match[2])];
  return { made: link(address, ...(match[0][0] === "!" ? [document.createTextNode("image: "), ...inner] : inner)), stop: NAMED.lastIndex };
}

function bare(text, i) {
  if (text[i] === "h" && /\w/.test(text[i - 1] ?? "")) return null;
  BARE.lastIndex = i;
  const match = BARE.exec(text);
  if (!match) return null;
  const written = match[1] ?? match[2].replace(/[.,;:!?*_~)\]]+$/, "");
  const address = safe(written);
  return address && { made: link(address, written), stop: match[1] ? BARE.lastIndex : i + written.length };
}

/** The address, if it leads to the web or a mailbox; else null. */
function safe(written) {
  try {
    const { protocol, href } = new URL(written);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch {
    return null; // relative ones would lead into this server
  }
}

const link = (href, ...children) =>
  html("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
