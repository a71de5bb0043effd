// Files from the computer that serves the page: whole, and the ones that were meant.

/**
 * Fetch a file and hold it against its size and, where the browser can, its digest.
 * @param {string} folder on the server, such as "plan/"
 * @param {{file: string, bytes: number, sha256: string}} entry
 * @param {(bytes: number) => void} [heard] told how many bytes more have arrived
 * @returns {Promise<Uint8Array>}
 */
export async function fetched(folder, { file, bytes, sha256 }, heard = () => {}) {
  const response = await fetch(folder + file);
  if (!response.ok) throw new Error(`${file} cannot be had from the server (${response.status})`);
  const content = new Uint8Array(bytes), reader = response.body.getReader();
  let at = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (at + value.length <= bytes) content.set(value, at);
    at += value.length;
    heard(value.length);
  }
  let same = at === bytes;
  if (same && crypto.subtle) { // only on a secure page
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
    same = sha256 === Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  }
  if (!same) throw new Error(`${file} is not the one that was meant: its content has changed`);
  return content;
}
