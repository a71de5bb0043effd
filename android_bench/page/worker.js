// Measures what it is told to, one cell or copy of memory at a time, so that the page stays alive.
// Knows the rules of measuring; knows neither the order of cells nor the result. A whole decoder is
// timed in a worker of its own.

import { decoded, engine } from "./engines.js";
import { fetched } from "./fetched.js";
import { filled } from "./inputs.js";
import { parity } from "./parity.js";

let plan, runner, step;
let heap = () => null; // bytes of WebAssembly's memory
const files = new Map();

/** A file of the plan, whole: fetched once, held against its size and, where it can be, its digest. */
function load(file) {
  if (!files.has(file)) files.set(file, fetched("plan/", plan.files.find((entry) => entry.file === file)).then(({ buffer }) => buffer).catch((error) => {
    files.delete(file);
    throw error;
  }));
  return files.get(file);
}

/** The smallest step of the clock, in milliseconds. */
function clockStep() {
  let smallest = Infinity;
  for (let changes = 0, last = performance.now(); changes < 50; ) {
    const now = performance.now();
    if (now === last) continue;
    smallest = Math.min(smallest, now - last);
    last = now;
    changes += 1;
  }
  return smallest;
}

/** So many runs that even the quickest of a few samples takes that many milliseconds. */
async function enough(run, target) {
  for (let repeats = 1; ; ) {
    let quickest = Infinity;
    for (let i = 0; i < 3; i++) quickest = Math.min(quickest, await run(repeats));
    if (quickest >= target || repeats >= 1 << 20) return repeats;
    const missing = (1.2 * target) / Math.max(quickest, step);
    repeats = Math.ceil(repeats * Math.min(Math.max(missing, 1.2), 10));
  }
}

/**
 * Warm up, then take one round's samples.
 * @param {(repeats: number) => number | Promise<number>} run the milliseconds of so many runs
 * @param {number} [repeats] runs per sample, as in earlier rounds; otherwise found here: so many
 *   that a sample is long beside the clock's step
 */
async function samples(run, repeats) {
  const { warmup_runs, warmup_seconds, min_runs, min_seconds, rounds, max_timer_share } = plan.rules;
  let runs = 0;
  const start = performance.now();
  const spent = () => performance.now() - start;
  while (runs < warmup_runs || spent() < warmup_seconds * 1000) {
    await run(1);
    runs += 1;
  }
  repeats ??= await enough(run, (2 * step) / max_timer_share);
  const found = [];
  for (let total = 0; found.length < min_runs / rounds || total < (min_seconds * 1000) / rounds; ) {
    const ms = await run(repeats);
    if (!(ms > 0)) throw new Error("the clock stood still");
    found.push(Number(((ms * 1000) / repeats).toFixed(3)));
    total += ms;
  }
  return { samples_us: found, runs_per_sample: repeats };
}

/** One visit to a cell: load, feed, check where asked, measure, let go. */
async function visit({ id, repeats, check }) {
  const cell = plan.cells.find((entry) => entry.id === id);
  const model = new Uint8Array(await load(cell.model));
  const start = performance.now();
  const { session, got } = await runner.load(model);
  const load_ms = performance.now() - start;
  const release = [];
  try {
    const feeds = {}, inputs = {};
    for (const port of cell.inputs) {
      inputs[port.name] = await filled(port, load);
      const [name, tensor, drop] = await runner.feed(port, inputs[port.name]);
      feeds[name] = tensor;
      release.push(drop);
    }
    let found;
    if (check) {
      const { outputs } = await runner.run(session, feeds, 1);
      found = await parity(cell, decoded(outputs), inputs, load);
    }
    const run = async (count) => (await runner.run(session, feeds, count)).ms;
    return { ...(await samples(run, repeats)), load_ms, got, parity: found };
  } finally {
    for (const drop of release) drop();
    await session.release();
  }
}

/** A copy of memory of the size that a baseline names. */
function copy({ id, repeats }) {
  const { bytes } = plan.baselines.find((entry) => entry.id === id);
  const from = new Uint8Array(bytes).fill(1), to = new Uint8Array(bytes);
  const run = (count) => {
    const start = performance.now();
    for (let i = 0; i < count; i++) to.set(from);
    return performance.now() - start;
  };
  return samples(run, repeats);
}

async function open(given) {
  plan = given.plan;
  step = clockStep();
  runner = engine(given.provider);
  heap = () => runner.heap();
  return { features: await runner.open(given.threads), timer_us: step * 1000 };
}

/** The whole decoder, in a worker that has measured nothing else: WebAssembly is set up once. */
async function decoder({ plan: given, threads }) {
  plan = given;
  heap = (await import("./bound-ort.js")).heap;
  return (await import("./time-decoder.js")).timeDecoder(plan, threads, load);
}

const verbs = { open, visit, copy, decoder };

self.onmessage = async ({ data: { verb, given } }) => {
  try {
    self.postMessage({ found: await verbs[verb](given), heap: heap() });
  } catch (error) {
    self.postMessage({ failed: String(error?.message ?? error) });
  }
};
