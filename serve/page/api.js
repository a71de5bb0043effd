// Speaks OpenAI's API with the server that this page comes from. Knows no screen.

/** What the server refused, or that it could not be reached; `status` is 0 then. */
export class Refused extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

const UNREACHED = "the server cannot be reached; it may have stopped, or the network is gone";
const BROKE_OFF = "the answer broke off, as the connection was lost";

export class Api {
  /** @param {() => string} key gives the API key, "" where there is none */
  constructor(key) {
    this.key = key;
  }

  async #ask(path, options = {}, headers = {}) {
    const key = this.key();
    if (key) headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(UNREACHED);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /** The model that answers, whether it can chat, and the policy and budget of every conversation. */
  async facts() {
    const { data: [{ id, chat_template: chats = true }] } = await (await this.#ask("v1/models")).json();
    return { model: id, chats, ...(await (await this.#ask("v1/kvcap/memory")).json()) };
  }

  /** Which tokens of a conversation are held; null where the server has none of that id at hand. */
  async strip(id) {
    try {
      return await (await this.#ask(`v1/kvcap/sessions/${encodeURIComponent(id)}/strip`)).json();
    } catch (error) {
      if (error.status === 404) return null;
      throw error;
    }
  }

  /**
   * Answer a conversation.
   * @param {object} asked the model, the messages, the pinned ones' indices, the conversation's id
   *   and settings
   * @param {AbortSignal} signal stops the answer
   * @param {(piece: {content?: string, reasoning_content?: string, progress?: object}) => void} hear hears of
   *   every piece, and before the first of how far the prompt is read, in tokens: {total, cache, processed, time_ms}
   * @returns {Promise<{reason: string | null, usage: object | null}>} why it ended, and what it took
   */
  async answer({ model, messages, pins, id, settings }, signal, hear) {
    const sent = messages.map(({ role, content, reasoning_content }, i) =>
      ({ role, content, reasoning_content, ...(pins.includes(i) && { pin: true }) }));
    const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
    const body = {
      model, messages: [...system, ...sent], temperature: settings.temperature, max_tokens: settings.tokens,
      stream: true, stream_options: { include_usage: true }, return_progress: true,
    };
    const response = await this.#ask("v1/chat/completions",
      { method: "POST", body: JSON.stringify(body), signal },
      { "Content-Type": "application/json", "X-Session-Id": id });
    let reason = null, usage = null;
    for await (const event of events(response.body)) {
      if (event === "[DONE]") return { reason, usage };
      const { choices = [], error, ...more } = JSON.parse(event);
      if (error) throw new Refused(error.message, 500);
      usage = more.usage ?? usage;
      if (more.prompt_progress) hear({ progress: more.prompt_progress });
      for (const { delta, finish_reason: ended } of choices) {
        if (delta?.content || delta?.reasoning_content) hear(delta);
        reason = ended ?? reason;
      }
    }
    throw new Refused(BROKE_OFF);
  }
}

/** Why the server refused, in its own words where it gives any. */
async function refusal(response) {
  const { status, headers } = response;
  let message = `the server answered ${status} ${response.statusText}`.trim();
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Something between here and the server answered, in a form of its own.
  }
  const seconds = Number(headers.get("Retry-After"));
  return new Refused(message, status, seconds > 0 ? seconds : null);
}

/** The data of every server-sent event of a stream. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let left = "", data = [];
  try {
    while (true) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Refused(BROKE_OFF);
      });
      if (done) return;
      const lines = (left + value).split(/\r?\n/);
      left = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
