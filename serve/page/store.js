// Conversations as this browser keeps them, each under a key of its own, so that tabs do not
// overwrite each other's. Whoever changes one reads it anew first, as another tab may have changed
// it. The API key is the tab's alone. Knows no screen and no network.

const PREFIX = "kvcap.conversation.", KEY = "kvcap.api-key", CURRENT = "kvcap.current";
const SETTINGS = "kvcap.settings", PLAIN = { system: "", temperature: null, tokens: null };
const LONGEST = 60; // letters of a title

/** A storage; where it is forbidden, as in some private windows, one that lasts as long as the page. */
function kept(storage) {
  try {
    const found = storage();
    found.getItem(PREFIX);
    return found;
  } catch {
    const own = new Map();
    return {
      getItem: (key) => own.get(key) ?? null,
      setItem: (key, value) => own.set(key, value),
      removeItem: (key) => own.delete(key),
      key: (i) => [...own.keys()][i] ?? null,
      get length() { return own.size; },
    };
  }
}
const local = kept(() => localStorage), tab = kept(() => sessionStorage);

/** 32 random hexadecimal digits; `crypto.randomUUID` is only there where an origin is secure. */
function fresh() {
  const drawn = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(drawn, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A conversation that has not begun, with the settings chosen last; it is kept once something is said. */
export const begun = () => ({ id: fresh(), title: "", messages: [], pins: [], settings: settings.get(), changed: 0 });

/** What a list calls a conversation: by its title or, where it has none, the beginning of its first message. */
export function titled({ title, messages }) {
  if (title) return title;
  const text = (messages[0]?.content ?? "").trimStart().slice(0, 10 * LONGEST).trim().replace(/\s+/g, " ");
  const letters = [...text];
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : text || "New conversation";
}

const sound = (found) =>
  typeof found?.id === "string" && Number.isFinite(found.changed) &&
  Array.isArray(found.pins) && found.pins.every(Number.isInteger) && Array.isArray(found.messages) &&
  found.messages.every((one) => typeof one?.role === "string" && typeof one.content === "string");

function read(key) {
  try {
    const found = JSON.parse(local.getItem(key));
    return sound(found) ? { title: "", settings: PLAIN, ...found } : null;
  } catch {
    return null; // not ours, or broken off
  }
}

/** Conversations that the browser had no room for, as they are in this tab, by their ids: {conversation, saved}. */
const unsaved = new Map();

/** Every conversation, those that changed last first. */
export function all() {
  const keys = Array.from({ length: local.length }, (_, i) => local.key(i));
  const saved = keys.filter((key) => key?.startsWith(PREFIX) && !unsaved.has(key.slice(PREFIX.length)));
  return [...saved.map(read).filter(Boolean), ...onlyHere()].sort((a, b) => b.changed - a.changed);
}

/** Those whose title or messages hold these words, each somewhere. */
export function holding(conversations, words) {
  const wanted = words.toLocaleLowerCase().split(/\s+/).filter(Boolean);
  return conversations.filter((one) => {
    const text = [one.title, ...one.messages.map(({ content }) => content)].join("\n").toLocaleLowerCase();
    return wanted.every((word) => text.includes(word));
  });
}

/** A conversation by its id; null where there is none. */
export const find = (id) => (unsaved.has(id) ? structuredClone(unsaved.get(id).conversation) : read(PREFIX + id));

/** Those that are lost with this tab, as the browser has no room for them. */
export const onlyHere = () => structuredClone([...unsaved.values()].map((one) => one.conversation));

/** Keep a conversation: in the browser or, where that has no room, in this tab. */
export function keep(conversation) {
  const { id } = conversation, saved = local.getItem(PREFIX + id), had = unsaved.get(id) ?? { saved };
  // Another tab may have saved it meanwhile: both are kept.
  const put = had.saved === saved ? conversation : { ...conversation, id: fresh() };
  if (save(PREFIX + put.id, put)) unsaved.delete(id);
  else unsaved.set(id, { conversation: structuredClone(conversation), saved: had.saved });
}

/** Put a value into the browser's storage, if there is room. */
function save(key, value) {
  try {
    local.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Forget a conversation, which may leave room for others. */
export function drop(id) {
  unsaved.delete(id);
  local.removeItem(PREFIX + id);
  onlyHere().forEach(keep);
}

/** Hear of conversations that another tab changed: of the id of one, or of null where it may be any. */
export function watch(hear) {
  addEventListener("storage", ({ key }) => {
    if (key === null) hear(null);
    else if (key.startsWith(PREFIX)) hear(key.slice(PREFIX.length));
  });
}

/** How conversations are answered that begin from now on; null leaves it to the server. */
export const settings = {
  get() {
    try {
      return { ...PLAIN, ...JSON.parse(local.getItem(SETTINGS)) };
    } catch {
      return PLAIN; // not ours
    }
  },
  set: (chosen) => save(SETTINGS, chosen),
};

/** The conversation that this tab shows, through reloads. */
export const current = {
  get: () => tab.getItem(CURRENT),
  set: (id) => tab.setItem(CURRENT, id),
};

/** The API key; "" where none was given. */
export const apiKey = {
  get: () => tab.getItem(KEY) ?? "",
  set: (key) => tab.setItem(KEY, key),
};
