// Runs a decoder of kvcap's own export (`kvcap.decoder/2`, kind shared) and evicts after every block.
//
// The twin of `Shared` in `runtime/backends/onnxruntime/decoder.py`. Past and present of a layer are
// one buffer: the decoder's graph writes a block behind the slots in use, another graph says which
// slots go, and survivors move into their places. Knows no text.

import { Graph, NoMemory, Numbers } from "./bound-ort.js";
import { LayerSlots, Turns, WindowSlots } from "./slots.js";

const EVERY = 64; // tokens in generation after which it evicts
const NONE = [1, 2]; // the shape of the pinned spans: one that is empty

/** A decoder with its buffers, which never grow. */
export class Decoder {
  /**
   * @param {object} facts kvcap.json
   * @param {(file: string) => Promise<Uint8Array>} file gives one of its files
   * @param {number} every in generation, evict every so many tokens
   */
  static async load(facts, file, every = EVERY) {
    const { decoder } = facts.graphs, beside = facts.files.map((entry) => entry.file).filter((name) => name.startsWith(`${decoder.file}.`));
    const evictors = [];
    for (const { file: name, layers } of facts.evictors) {
      const graph = await Graph.load(await file(name));
      for (const layer of layers) evictors[layer] = graph;
    }
    const weights = [];
    for (const path of beside) weights.push({ path, data: await file(path) });
    const graph = await Graph.load(await file(decoder.file), weights);
    return new Decoder(facts, graph, evictors, every);
  }

  constructor(facts, graph, evictors, every) {
    const { budgets, block_size: block } = facts;
    Object.assign(this, { facts, graph, evictors, block, seen: 0, every: Math.min(every, block) });
    const turning = budgets.filter((_, i) => facts.rotates[i]);
    this.turns = turning.length ? new Turns(facts.inv_freq, Math.max(...turning) + block + 1, facts.interleaved) : null;
    const buffers = budgets.map(() => ({}));
    for (const { name, layer, dtype, full } of facts.state) buffers[layer][name] = new Numbers(dtype, full);
    this.layers = budgets.map((budget, i) => facts.windows?.[i] ? new WindowSlots(buffers[i], budget)
      : new LayerSlots(buffers[i], budget, facts.rotates[i] ? this.turns : null));
    this.windows = this.layers.filter((layer) => layer instanceof WindowSlots);
    this.capped = this.layers.filter((layer) => layer instanceof LayerSlots);
    this.lengths = [...new Set(budgets)].sort((a, b) => b - a);
    this.held = new Numbers("int32", [this.lengths.length]);
    this.count = { seen: new Numbers("int32", []), stay: new Numbers("int32", []), pinned: new Numbers("int32", NONE) };
    this.ids = new Numbers("int64", [1, block]);
    this.logits = new Numbers("float32", [1, facts.model.vocabulary]);
    // What evictors are told of a block, which is not held.
    this.told = facts.outputs.filter(({ name }) => /^(block|new)_/.test(name) && graph.outputs.includes(name))
      .map(({ name, dtype, axes }) => {
        const sized = (length) => axes.map(({ size }) => (typeof size === "number" ? size : length));
        const [, kind, layer] = name.match(/^[a-z]+_(.*)\.(\d+)$/);
        return { name, kind, layer: Number(layer), sized, numbers: new Numbers(dtype, sized(block)) };
      });
    this.states = evictors.find(Boolean).outputs.filter((name) => name !== "gone").map((name) => name.replace("next_", ""));
    this.#scratch();
  }

  /** Room for what an evictor reads that does not lie in one piece, and for what it says. */
  #scratch() {
    this.parts = {};
    const rows = ([, heads, capacity]) => [1, heads, capacity];
    const largest = this.capped.reduce((a, b) => (a.capacity >= b.capacity ? a : b));
    for (const name of ["positions", ...largest.state]) {
      const { shape } = largest.buffers[name], { dtype } = this.facts.state.find((entry) => entry.name === name);
      this.parts[name] = new Numbers(dtype, rows(shape));
      if (this.states.includes(name)) this.parts[`next_${name}`] = new Numbers(dtype, rows(shape));
    }
    const asked = this.told.find(({ kind }) => kind === "queries");
    if (asked) {
      const [one, heads, tokens, size] = asked.numbers.shape;
      const most = Math.max(tokens, largest.buffers.queries?.shape[2] ?? 0);
      const { dtype } = this.facts.outputs.find(({ name }) => name === asked.name);
      this.parts.queries = new Numbers(dtype, [one, heads, most, size]);
    }
    this.gone = new Numbers("int64", [1, largest.heads, largest.capacity]);
  }

  /** Bytes of all buffers that hold the conversation, and of the table of rotations. */
  get bytes() {
    const table = this.turns?.bytes ?? 0;
    return this.layers.reduce((sum, { buffers }) => Object.values(buffers).reduce((a, { bytes }) => a + bytes, sum), table);
  }

  /** Bytes of the slots in use. */
  get usedBytes() {
    return this.layers.reduce((sum, layer) => sum + layer.usedBytes, 0);
  }

  /** Slots in use per KV head and capped layer, on average (rounded up). */
  get slots() {
    return Math.ceil(this.capped.reduce((sum, { held }) => sum + held, 0) / this.capped.length);
  }

  /** Tokens that the next block has at most: a slot each, behind those in use. */
  get room() {
    return Math.min(this.block, ...this.layers.map(({ capacity, held }) => capacity - held));
  }

  /** Positions of the kept tokens by capped layer and head, ascending. */
  get positions() {
    return this.capped.map(({ buffers: { positions }, heads, capacity, held }) =>
      Array.from({ length: heads }, (_, head) => Array.from(positions.array.subarray(head * capacity, head * capacity + held)).sort((a, b) => a - b)));
  }

  /** Forget the conversation; the buffers stay. */
  reset() {
    this.seen = 0;
    for (const layer of this.layers) layer.held = 0;
  }

  /**
   * Read a block of up to `room` tokens, and evict.
   * @returns {Float32Array} the last token's logits, valid until the next run
   */
  run(ids) {
    const length = ids.length, { graph, seen } = this;
    this.ids.array.set(ids.map(BigInt));
    this.count.seen.array[0] = seen;
    const held = Object.fromEntries(this.layers.map((layer) => [layer.budget, layer.held]));
    this.held.array.set(this.lengths.map((budget) => held[budget]));
    const inputs = { input_ids: this.ids.as([1, length]), held: this.held }, outputs = { logits: this.logits };
    if (graph.inputs.includes("seen")) inputs.seen = this.count.seen;
    this.layers.forEach(({ buffers }, i) => {
      for (const name of ["keys", "values"]) {
        inputs[`${name}.${i}`] = outputs[`present_${name}.${i}`] = buffers[name];
      }
    });
    for (const { name, sized, numbers } of this.told) outputs[name] = numbers.as(sized(length));
    graph.run(inputs, outputs);
    const told = this.layers.map(() => ({}));
    for (const { kind, layer, numbers } of this.told) told[layer][kind] = numbers.array;
    this.layers.forEach((layer, i) => layer.append(seen, length, told[i]));
    this.seen += length;
    this.#evict(length, told);
    return this.logits.array;
  }

  /** Bring the policy's state up to date and, where it is time, evict down to the budget. */
  #evict(length, told) {
    const least = length > 1 ? 1 : this.every;
    this.count.seen.array[0] = this.seen;
    for (const window of this.windows) window.slide(least);
    this.layers.forEach((layer, i) => {
      if (!this.evictors[i]) return; // its window slid
      const due = layer.held - layer.budget >= least;
      if (!due && !this.states.length) return;
      const count = due ? layer.held - layer.budget : 0;
      const gone = this.#gone(layer, this.evictors[i], told[i].queries, length, count);
      if (due) layer.giveUp(gone, count);
    });
  }

  /** The slots of a layer that go [K, count]; its policy's state is brought up to date. */
  #gone(layer, evictor, queries, length, count) {
    const { heads, capacity, held, buffers } = layer, rows = [1, heads, held];
    this.count.stay.array[0] = held - count;
    const given = { ...this.count, keys: buffers.keys, values: buffers.values };
    for (const name of ["positions", ...layer.state]) {
      const from = buffers[name].array, to = this.parts[name].array;
      for (let head = 0; head < heads; head++) to.set(from.subarray(head * capacity, head * capacity + held), head * held);
      given[name] = this.parts[name].as(rows);
    }
    if (queries) given.queries = this.#queries(layer, queries, length);
    const inputs = Object.fromEntries(evictor.inputs.map((name) => [name, given[name]]));
    const outputs = { gone: this.gone.as([1, heads, count]) };
    for (const name of this.states) outputs[`next_${name}`] = this.parts[`next_${name}`].as(rows);
    evictor.run(inputs, outputs);
    for (const name of this.states) {
      const from = this.parts[`next_${name}`].array, to = buffers[name].array;
      for (let head = 0; head < heads; head++) to.set(from.subarray(head * held, (head + 1) * held), head * capacity);
    }
    return this.gone.array.subarray(0, heads * count);
  }

  /** The last queries that the policy looks at: of its window, else of the block. */
  #queries({ buffers }, queries, length) {
    const window = buffers.queries, [, heads, , size] = (window ?? this.parts.queries).shape;
    const there = window ? window.shape[2] : length, from = window ? window.array : queries;
    const looked = Math.min(window ? this.seen : (this.facts.queries_observed ?? length), there);
    const to = this.parts.queries.array;
    for (let head = 0; head < heads; head++) {
      to.set(from.subarray(((head + 1) * there - looked) * size, (head + 1) * there * size), head * looked * size);
    }
    return this.parts.queries.as([1, heads, looked, size]);
  }
}

export { NoMemory };
