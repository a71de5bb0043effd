// A conversation over one decoder: messages in, pieces of text out, as `runtime/session` has it.
// Knows no screen and no network.

import { drawn } from "./sampler.js";

const MOST = 512; // tokens of an answer, where the model says nothing else
const pause = () => new Promise((resolve) => { // lets the page be heard, without a timer's 4 ms
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => {
    port1.close();
    resolve();
  };
  port2.postMessage(null);
});

export class Conversation {
  constructor(decoder, words, system) {
    Object.assign(this, { decoder, words, messages: [], unread: [], stopping: false });
    this.opening = system ? [{ role: "system", content: system }] : [];
    this.settings = decoder.facts.generation;
    this.ends = new Set(this.settings.eos_token_id);
  }

  /** Forget everything; the buffers stay. */
  clear() {
    this.decoder.reset();
    Object.assign(this, { messages: [], unread: [] });
  }

  stop() {
    this.stopping = true;
  }

  /**
   * Answer a message.
   * @param {(event: {read?: number, of?: number, piece?: string}) => void} tell hears what is read
   *   and written
   * @returns {Promise<object>} why it ended (stop, length, stopped, unread), tokens and times
   */
  async say(text, tell) {
    const { decoder, words } = this, message = { role: "user", content: text };
    const known = decoder.seen > 0;
    const ids = known ? [...this.unread, ...words.encode(words.renderTurn(message))]
      : words.encode(words.render([...this.opening, ...this.messages, message]));
    this.stopping = false;
    const start = performance.now();
    let logits, read = 0;
    try {
      while (read < ids.length) {
        if (this.stopping) return this.#takeBack(ids.length);
        const block = ids.slice(read, read + decoder.room);
        logits = decoder.run(block);
        read += block.length;
        tell({ read, of: ids.length });
        await pause();
      }
      return await this.#answer(message, ids, logits, start, tell);
    } catch (error) {
      decoder.reset(); // layers may hold different tokens
      this.unread = [];
      throw error;
    }
  }

  /** Nothing is answered that was not read whole: it is all read again with the next message. */
  #takeBack(tokens) {
    this.decoder.reset();
    this.unread = [];
    return { reason: "unread", prompt: tokens, tokens: 0 };
  }

  async #answer(message, ids, first, start, tell) {
    const { decoder, settings } = this, piece = this.words.stream();
    const recent = ids.slice(-decoder.facts.budget_tokens), most = settings.max_new_tokens ?? MOST;
    let logits = first, answer = "", reason = null, tokens = 0, begun = 0;
    while (!reason) {
      const token = drawn(logits, recent, settings);
      tokens += 1;
      begun ||= performance.now();
      const ended = this.ends.has(token);
      this.unread = ended ? [] : [token];
      if (!ended) {
        const text = piece(token);
        answer += text;
        tell({ piece: text });
      }
      await pause();
      reason = ended ? "stop" : this.stopping ? "stopped" : tokens >= most ? "length" : null;
      if (reason) break;
      recent.push(token);
      logits = decoder.run([token]);
    }
    this.messages.push(message, { role: "assistant", content: answer });
    const now = performance.now();
    return { reason, prompt: ids.length, tokens, first_ms: begun - start, decode_ms: now - begun };
  }
}
