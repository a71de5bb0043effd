// The dialog about a conversation: its title, how it is answered, and what can be saved of it.

import { byId } from "./dom.js";
import { exportJson, exportMarkdown } from "./exports.js";
import * as store from "./store.js";

const dialog = byId("about");

/**
 * Let the user change a conversation.
 * @param {() => object} current gives it as it is by now
 * @param {(title: string, settings: object) => void} save takes what it is called, "" as its first
 *   message, and how it is answered
 */
export function askAbout(current, save) {
  const { title = "", settings } = current();
  byId("about-title").value = title;
  byId("about-title").placeholder = store.titled({ messages: current().messages });
  byId("system").value = settings.system;
  byId("temperature").value = settings.temperature ?? "";
  byId("tokens").value = settings.tokens ?? "";
  byId("about-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    save(byId("about-title").value.trim(), {
      system: byId("system").value,
      temperature: given("temperature"),
      tokens: given("tokens"),
    });
  };
  byId("export-json").onclick = () => exportJson(store.titled(current()), current());
  byId("export-markdown").onclick = () => exportMarkdown(current());
  byId("export-json").disabled = byId("export-markdown").disabled = !current().messages.length;
  dialog.showModal();
}

/** A number that was given; null where none was, which leaves it to the server. */
const given = (id) => (byId(id).value === "" ? null : byId(id).valueAsNumber);

byId("about-cancel").addEventListener("click", () => dialog.close());
