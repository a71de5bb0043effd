// Conversations as files.

import { html } from "./dom.js";

/** Give conversations as a JSON file: the one, or a list of them. */
export function exportJson(name, found) {
  download(`${name}.json`, "application/json", `${JSON.stringify(found, null, 2)}\n`);
}

function download(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  html("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000); // once the browser has read it
}
