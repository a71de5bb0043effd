// Conversations as files.

import { html } from "./dom.js";
import { titled } from "./store.js";
import { parted } from "./thoughts.js";

const SPEAKERS = { user: "You", assistant: "Answer" };

/** Give conversations as a JSON file: the one, or a list of them. */
export function exportJson(name, found) {
  download(name, "json", "application/json", `${JSON.stringify(found, null, 2)}\n`);
}

/** Give a conversation as a Markdown file, without what the model thought. */
export function exportMarkdown(conversation) {
  const { system } = conversation.settings, turns = conversation.messages.map((one) => [SPEAKERS[one.role], parted(one).text]);
  const parts = [...(system ? [["System prompt", system]] : []), ...turns];
  const text = [`# ${titled(conversation)}`, ...parts.map(([who, words]) => `## ${who}\n\n${words.trim()}`)].join("\n\n");
  download(titled(conversation), "md", "text/markdown", `${text}\n`);
}

function download(title, ending, type, text) {
  const name = `${title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.${ending}`;
  const href = URL.createObjectURL(new Blob([text], { type }));
  html("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000); // once the browser has read it
}
