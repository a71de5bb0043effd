// Runs functions of the chat page without a browser: a small document stands in for the browser's.
// Reads a list of [name, arguments] from stdin, and writes what each gives as JSON.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const VOID = ["br", "hr", "img", "input"];
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

class Text {
  constructor(data) { this.data = data; }
  get textContent() { return this.data; }
  get outerHTML() { return escaped(this.data); }
}

class Element {
  attributes = new Map();
  childNodes = [];
  classList = { add: () => {} };

  constructor(name) { this.localName = name; }
  get tagName() { return this.localName.toUpperCase(); }
  get dir() { return this.attributes.get("dir") ?? ""; }
  set dir(value) { this.setAttribute("dir", value); }
  get textContent() { return this.childNodes.map((one) => one.textContent).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  addEventListener() {}
  append(...nodes) {
    for (const node of nodes.map((one) => (typeof one === "string" ? new Text(one) : one))) {
      node.remove?.();
      node.parent = this;
      this.childNodes.push(node);
    }
  }
  remove() {
    if (this.parent) this.parent.childNodes = this.parent.childNodes.filter((one) => one !== this);
  }
  replaceChildren(...nodes) {
    this.childNodes = [];
    this.append(...nodes);
  }
  get innerHTML() { return this.childNodes.map((one) => one.outerHTML).join(""); }
  get outerHTML() {
    const marks = [...this.attributes].map(([name, value]) => ` ${name}="${value.replace(/"/g, "&quot;")}"`).join("");
    return `<${this.localName}${marks}>${VOID.includes(this.localName) ? "" : `${this.innerHTML}</${this.localName}>`}`;
  }
  get all() { return this.childNodes.flatMap((one) => (one instanceof Element ? [one, ...one.all] : [])); }
}

globalThis.document = { createElement: (name) => new Element(name), createTextNode: (text) => new Text(text) };
const page = pathToFileURL(`${process.argv[2]}/`);
const load = (name) => import(new URL(name, page));
const { Growing } = await load("markdown.js"), { html, ...words } = await load("dom.js");
const { turn } = await load("turns.js"), { colour } = await load("colours.js");
const { parted } = await load("thoughts.js"), { holding, titled } = await load("store.js");

function grown(text, steps = null) {
  const box = new Element("div"), growing = new Growing(box);
  for (const step of steps ?? [text.length]) growing.update(text.slice(0, step));
  return box;
}

const UNITS = {
  ...words, parted, holding, titled,
  drawn: (text, steps) => grown(text, steps).innerHTML,
  made: (text) => grown(text).all.map((one) => [one.localName, Object.fromEntries(one.attributes)]),
  said: (message) => turn(message, false, {}).all.map((one) => one.textContent),
  async coloured(code, language) {
    const element = html("code", {}, code);
    await colour(element, language);
    return [element.textContent, element.childNodes.map((one) => [one.attributes?.get("class") ?? null, one.textContent])];
  },
};
const results = [];
for (const [name, given] of JSON.parse(readFileSync(0, "utf8"))) results.push(await UNITS[name](...given));
process.stdout.write(JSON.stringify(results));
