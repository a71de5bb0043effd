// Answers while they are written, each in the conversation that it belongs to, whichever is in
// sight. Knows no screen.

import { Refused } from "./api.js";
import * as store from "./store.js";

const ELSEWHERE = "this conversation is being answered in another tab; wait for it, or begin another conversation";
const SHORTEST = 0.25; // seconds between the first and the last token from which they tell a speed

const running = new Map(); // by their conversations' ids

/** The answer that this tab is writing in a conversation, if there is one. */
export const answerIn = (id) => running.get(id);

/** Keep what is written when the page goes; the server ends an answer that nobody reads. */
export const keepAll = () => running.forEach((one) => one.keepHalf());

export class Answer {
  text = ""; // what is written of it here
  thoughts = ""; // what is thought before that, where the server tells them apart
  progress = null; // how far the prompt is read, in tokens: {total, cache, processed, time_ms}
  asked = null; // the messages that the model is given; null until it is begun
  reason = null; // why it ended, if it was before its time: length, stopped or broken
  failed = null; // an error
  replaced = null; // the messages and pins there were, where it takes the place of some
  #control = new AbortController();
  #ask; #conversation; #before; #base;

  /**
   * @param {object} conversation as it is in sight
   * @param {(messages: object[]) => object[]} ask gives what to answer, of the messages that are
   *   kept by then: one of the user's comes last, or the beginning of the answer
   */
  constructor(conversation, ask) {
    this.#conversation = conversation;
    this.#ask = ask;
  }

  get id() { return this.#conversation.id; }

  /** What there is to show before it. */
  get earlier() {
    return this.asked?.filter((one, i) => i < this.asked.length - 1 || one.role === "user") ?? this.#conversation.messages;
  }

  /** The message that it is so far. */
  get message() {
    const last = this.asked?.at(-1), former = last?.role === "assistant" ? last : { content: "" };
    const thoughts = (former.reasoning_content ?? "") + this.thoughts;
    return {
      role: "assistant", content: former.content + this.text,
      ...(thoughts && { reasoning_content: thoughts }), ...(this.reason && { ended: this.reason }), ...(this.took && { took: this.took }),
    };
  }

  get begun() { return Boolean(this.text || this.thoughts); }

  get empty() { return !this.begun && (this.failed !== null || this.reason === "stopped"); }

  stop() { this.#control.abort(); }

  /**
   * Write it, and hear of its beginning and of every piece. Where nothing comes of it, the
   * conversation is as it was if `takeBack` says so at the end; else the message waits for an answer.
   * @returns {Promise<string | null>} the conversation that it is in; null where it was deleted
   */
  async write(api, model, hear, takeBack) {
    running.set(this.id, this);
    try {
      await alone(this.id, async () => {
        const conversation = this.#begin();
        hear();
        let first = null; // when the first token came
        const { reason, usage } = await api.answer({ ...conversation, messages: this.asked, model }, this.#control.signal,
          ({ content, reasoning_content: thought, progress }) => {
            if (progress) this.progress = progress;
            else first ??= performance.now();
            this.text += content ?? "";
            this.thoughts += thought ?? "";
            hear();
          });
        this.reason = reason === "length" ? reason : null;
        const { completion_tokens: tokens, recalled, recalled_passages: passages } = usage ?? {};
        const seconds = first === null ? 0 : (performance.now() - first) / 1000;
        const speed = tokens > 1 && seconds > SHORTEST ? (tokens - 1) / seconds : undefined;
        this.took = { tokens, speed, recalled, passages };
      });
    } catch (error) {
      if (this.#control.signal.aborted) this.reason = "stopped";
      else [this.failed, this.reason] = [error, "broken"];
    } finally {
      running.delete(this.id);
    }
    return this.asked ? this.#end(takeBack()) : this.id;
  }

  /** Read the conversation anew, and keep the message at once, except where it replaces an answer. */
  #begin() {
    const found = store.find(this.id) ?? this.#conversation;
    this.#before = found.messages;
    this.asked = this.#ask(found.messages);
    if (this.asked.length >= this.#before.length) found.messages = this.asked;
    found.changed = Date.now();
    store.keep(found);
    this.#base = JSON.stringify(found.messages);
    return found;
  }

  #end(takeBack) {
    const found = store.find(this.id), messages = [...this.earlier, this.message];
    if (found === null) return null;
    if (JSON.stringify(found.messages) === this.#base) {
      if (!this.empty) {
        if (this.asked.length < this.#before.length) this.replaced = { messages: this.#before, pins: found.pins };
        found.messages = messages;
      } else if (takeBack) found.messages = this.#before;
      found.pins = found.pins.filter((index) => index < found.messages.length);
      if (found.messages.length) store.keep(found);
      else store.drop(found.id);
    } else if (!this.empty) { // another tab has gone on meanwhile: both are kept
      const own = { ...store.begun(), title: found.title, settings: found.settings, messages, changed: Date.now() };
      store.keep(own);
      return own.id;
    }
    return found.id;
  }

  /** Keep what there is of it, as it is about to break off. */
  keepHalf() {
    const found = this.begun ? store.find(this.id) : null;
    if (!found || JSON.stringify(found.messages) !== this.#base) return;
    found.messages = [...this.earlier, { ...this.message, ended: "stopped" }];
    this.#base = JSON.stringify(found.messages); // should the page come back after all
    store.keep(found);
  }
}

/** Do this while no other tab answers the conversation. Where an origin is not secure there are no locks. */
async function alone(id, work) {
  if (!navigator.locks) return work();
  return navigator.locks.request(`kvcap.answer.${id}`, { ifAvailable: true }, (lock) => {
    if (!lock) throw new Refused(ELSEWHERE);
    return work();
  });
}
