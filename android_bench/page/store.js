// The last result, kept in the browser until the server has it, so that a reload or a lost server
// loses nothing. Knows nothing of what a result holds.

const asked = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function results(mode) {
  const opening = indexedDB.open("kvcap", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("results");
  const database = await asked(opening);
  return database.transaction("results", mode).objectStore("results");
}

/** Keep a result in place of the one before; false where the browser keeps nothing. */
export async function keep(result) {
  try {
    await asked((await results("readwrite")).put(result, "last"));
    return true;
  } catch {
    return false; // private windows of some browsers
  }
}

/** The kept result, null where there is none. */
export async function kept() {
  try {
    return (await asked((await results("readonly")).get("last"))) ?? null;
  } catch {
    return null;
  }
}

/** Forget the kept result. */
export async function drop() {
  try {
    await asked((await results("readwrite")).delete("last"));
  } catch {
    // nothing was kept
  }
}

/**
 * Send a result to the server.
 * @returns {Promise<{file?: string, flags?: object[], refused?: string, lost?: boolean,
 *   why?: string}>} what became of it
 */
export async function send(result) {
  let response, answer;
  try {
    response = await fetch("results", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(result),
    });
    answer = await response.json();
  } catch {
    return { lost: true };
  }
  if (response.ok) return answer;
  const why = answer.error ?? `answer ${response.status}`;
  const again = response.status >= 500 || response.status === 408; // full, busy, or too slow
  return again ? { lost: true, why } : { refused: why };
}

/** Offer a result as a file. */
export const save = (result) =>
  offer(result, "json", JSON.stringify(result, null, 1), "application/json");

/** Offer a line per cell under the plan's columns: texts are quoted, null is empty. */
export function saveTable(result, columns) {
  const field = (value) => value === null || value === undefined ? ""
    : typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : String(value);
  const lines = [columns, ...result.cells.map((row) =>
    columns.map((name) => (name in row ? row[name] : result.run[name])))];
  offer(result, "csv", lines.map((line) => `${line.map(field).join(",")}\n`).join(""), "text/csv");
}

function offer(result, ending, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `kvcap-${result.run.started.replace(/[-:]|\..*/g, "")}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
