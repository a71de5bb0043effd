// Times a whole decoder by the plan: the first token, an answer, a long prompt, and writing on and
// on. The twin of `runner/decoder.py`; it runs in a worker of its own and knows no result.

import { open } from "./bound-ort.js";
import { Decoder } from "./decoder.js";
import { fetched } from "./fetched.js";
import { numbers } from "./inputs.js";
import { argmax } from "./sampler.js";

/** A text that is read into an emptied decoder from its beginning. */
class Text {
  constructor(decoder, ids) {
    Object.assign(this, { decoder, ids });
    decoder.reset();
  }

  /** Read the first `count` tokens, in blocks; gives the likeliest next one. */
  read(count) {
    let token = 0;
    for (let at = 0; at < count; ) {
      const length = Math.min(count - at, this.decoder.room);
      token = this.run(Array.from({ length }, (_, i) => this.ids[(at + i) % this.ids.length]));
      at += length;
    }
    return token;
  }

  run(ids) {
    return argmax(this.decoder.run(ids));
  }
}

/** Whether the logits are those that the plan expects. */
function checked(decoder, { prompt, runs, allowed }, expected) {
  decoder.reset();
  let at = 0, error = 0, logits;
  for (const length of runs) logits = decoder.run(prompt.slice(at, (at += length)));
  expected.forEach((value, i) => {
    const off = Math.abs(logits[i] - value);
    if (!(off <= error)) error = off; // one that is no number stays
  });
  const passed = error <= allowed, found = { passed, error: Number.isFinite(error) ? error : null, allowed };
  return passed ? found : { ...found, text: `logits differ by ${error.toPrecision(3)}, allowed are ${allowed.toPrecision(3)}` };
}

/** Tokens of each window while it writes on, from an answer on. */
function sustained(text, first, { sustained_seconds: whole, window_seconds: window }) {
  const windows = [], end = performance.now() + whole * 1000;
  for (let token = first, start; (start = performance.now()) < end; ) {
    const until = Math.min(start + window * 1000, end);
    let tokens = 0;
    while (!tokens || performance.now() < until) {
      token = text.run([token]);
      tokens += 1;
    }
    windows.push({ seconds: (performance.now() - start) / 1000, tokens });
  }
  return windows;
}

/**
 * Everything that a result says of the plan's decoder.
 * @param {object} plan
 * @param {number} threads
 * @param {(file: string) => Promise<ArrayBuffer>} load a file of the plan
 */
export async function timeDecoder(plan, threads, load) {
  const wanted = plan.decoder, folder = wanted.manifest.replace(/[^/]*$/, "");
  open(threads);
  const facts = JSON.parse(new TextDecoder().decode(await load(wanted.manifest)));
  const listed = (file) => plan.files.find((entry) => entry.file === folder + file);
  let start = performance.now(), fetching = 0;
  const decoder = await Decoder.load(facts, async (file) => {
    const begun = performance.now(), content = await fetched("plan/", listed(file));
    fetching += performance.now() - begun;
    return content;
  }, wanted.evict_every);
  const found = { load_ms: performance.now() - start - fetching, held_bytes: decoder.bytes };
  found.parity = checked(decoder, wanted.check, new Float32Array(await load(wanted.check.file)));
  const ids = numbers(wanted.seed, Math.max(wanted.prompt_tokens, wanted.long_tokens)).map((n) => n % wanted.vocabulary);
  new Text(decoder, ids).read(facts.block_size); // its memory is there afterwards
  Object.assign(found, { long_ms: [], first_ms: [], token_us: [] });
  let text, token;
  for (let round = 0; round < plan.rules.rounds; round++) {
    start = performance.now();
    new Text(decoder, ids).read(wanted.long_tokens);
    found.long_ms.push(performance.now() - start);
    start = performance.now();
    text = new Text(decoder, ids);
    token = text.read(wanted.prompt_tokens);
    found.first_ms.push(performance.now() - start);
    const samples = [];
    for (let i = 1; i < wanted.answer_tokens; i++) {
      const before = performance.now();
      token = text.run([token]);
      samples.push(Math.max(performance.now() - before, 0.001) * 1000);
    }
    found.token_us.push(samples);
  }
  const evicting = Math.ceil(wanted.long_tokens / wanted.block) - Math.floor(wanted.budget / wanted.block);
  return { ...found, evicting_blocks: Math.max(0, evicting), sustained: sustained(text, token, wanted) };
}
