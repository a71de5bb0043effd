// Chats in a worker, so that the page stays alive. Answers one question after the other; while an
// answer is written only `stop` is heard.

import { NoMemory, open } from "./bound-ort.js";
import { Conversation } from "./conversation.js";
import { Decoder } from "./decoder.js";
import { fetched } from "./fetched.js";
import { Words } from "./words.js";

const FOLDER = "decoder/", MB = 1e6;
let conversation;

const meter = ({ decoder }) => ({
  slots: decoder.slots, budget: decoder.facts.budget_tokens, seen: decoder.seen,
  used: decoder.usedBytes, bytes: decoder.bytes,
});

/** Why a device says no, in words. */
function refusal(error, facts) {
  const size = (bytes) => `${(bytes / MB).toLocaleString("en", { maximumFractionDigits: 1 })} MB`;
  const memory = error instanceof NoMemory || error instanceof RangeError;
  if (!memory || !facts) return String(error?.message ?? error);
  return `there is not enough memory for ${size(facts.model.weights_bytes)} of weights and ${size(facts.state_bytes)} of slots; ` +
    "close other pages, or export it with --dtype int4 or fewer slots";
}

async function load(post) {
  let facts;
  try {
    const response = await fetch(`${FOLDER}kvcap.json`);
    if (!response.ok) throw new Error(`kvcap.json cannot be had from the server (${response.status})`);
    facts = await response.json();
    const entries = new Map(facts.files.map((entry) => [entry.file, entry]));
    const { tokenizer, config, chat_template: template } = facts.tokenizer;
    const graphs = [...facts.evictors.map(({ file }) => file), ...[...entries.keys()].filter((name) => name.startsWith(facts.graphs.decoder.file))];
    const total = graphs.reduce((sum, name) => sum + entries.get(name).bytes, 0);
    let arrived = 0;
    const file = (name) => fetched(FOLDER, entries.get(name), (bytes) => post({ loaded: (arrived += bytes), of: total }));
    const text = async (name) => name && new TextDecoder().decode(await fetched(FOLDER, entries.get(name)));
    let words;
    try {
      words = new Words(JSON.parse(await text(tokenizer)), JSON.parse((await text(config)) ?? "{}"), await text(template));
    } catch (error) {
      throw new Error(`the tokenizer cannot be used: ${error.message}`);
    }
    const threads = crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
    open(threads);
    const decoder = await Decoder.load(facts, file);
    conversation = new Conversation(decoder, words);
    return { facts, threads, meter: meter(conversation) };
  } catch (error) {
    throw new Error(refusal(error, facts));
  }
}

async function say({ text }, post) {
  const told = await conversation.say(text, (event) => post({ ...event, meter: meter(conversation) }))
    .catch((error) => {
      throw new Error(refusal(error, conversation.decoder.facts));
    });
  return { ...told, meter: meter(conversation) };
}

const verbs = {
  load: (_, post) => load(post),
  say,
  clear() {
    conversation.clear();
    return { meter: meter(conversation) };
  },
};

self.onmessage = async ({ data: { verb, given } }) => {
  if (verb === "stop") {
    conversation?.stop();
    return;
  }
  try {
    self.postMessage({ found: await verbs[verb](given, (event) => self.postMessage({ event })) });
  } catch (error) {
    self.postMessage({ failed: String(error?.message ?? error) });
  }
};
