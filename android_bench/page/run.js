// One run of a plan: every cell in every configuration, in rounds of random order, as one result.
// Drives workers and knows neither onnxruntime nor the screen. It pauses while the page is hidden.

import { conditions, oneThreadOnly } from "./device.js";
import { statistics } from "./stats.js";

/** Why a cell has no samples yet; stays where the run ends early. */
export const PENDING = "the run ended before its turn";

const now = () => new Date().toISOString();
const sentence = (provider, threads) =>
  provider === "webgpu" ? "WebGPU" : `WebAssembly, ${threads} thread${threads > 1 ? "s" : ""}`;

/** A UUID; `crypto.randomUUID` exists on secure pages only. */
function uuid() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 15) | 64;
  bytes[8] = (bytes[8] & 63) | 128;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

/** Fisher and Yates, by a small generator (mulberry32) so that a seed repeats the order. */
function shuffled(items, seed) {
  let state = seed >>> 0;
  const random = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  const order = [...items];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** The configurations a plan can be run in here, each with why it cannot. */
export function configurations(plan, gpu) {
  const alone = oneThreadOnly();
  const few = (threads) => threads > (navigator.hardwareConcurrency || 1)
    ? `${threads} threads asked for, the device offers ${navigator.hardwareConcurrency || 1}` : null;
  return [
    ...[...new Set([...plan.threads, 2])].map((threads) => ({
      provider: "wasm", threads, missing: threads > 1 ? alone ?? few(threads) : null,
      planned: plan.threads.includes(threads),
    })),
    { provider: "webgpu", threads: 1, missing: gpu.missing ?? null, fp16: gpu.fp16,
      software: gpu.software, planned: false },
  ].map((found) => ({ ...found, label: sentence(found.provider, found.threads) }));
}

/** A worker that answers one question after the other. */
class Bench {
  /** @param {object} memory of the result, whose peak grows with that of this worker */
  constructor(memory) {
    this.memory = memory;
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  }

  ask(verb, given) {
    return new Promise((resolve, reject) => {
      this.worker.onmessage = ({ data }) => {
        if (data.heap) Object.assign(this.memory, { peak_bytes: Math.max(this.memory.peak_bytes ?? 0, data.heap), reason: null });
        if ("failed" in data) reject(new Error(data.failed));
        else resolve(data.found);
      };
      this.worker.onerror = (event) => {
        event.preventDefault();
        reject(new Error(event.message || "the measuring part of the page could not start"));
      };
      this.stopped = () => reject(new Error("stopped"));
      this.worker.postMessage({ verb, given });
    });
  }

  close() {
    this.worker.terminate();
    this.stopped?.();
  }
}

/** A run: `start` resolves with the result, whole or, after `stop`, as far as it came. */
export class Run {
  /**
   * @param {object} plan
   * @param {object[]} chosen configurations
   * @param {object} about device and version of onnxruntime-web, for the result
   * @param {(state: object) => void} progress told after every visit
   */
  constructor(plan, chosen, about, progress) {
    Object.assign(this, { plan, chosen, progress });
    const { id, rules, shape, preset, reference } = plan;
    this.result = {
      schema: "kvcap.android_bench/1",
      run: { id: uuid(), plan: id, preset, reference, started: now(), finished: now(),
        runner: "browser", seed: rules.seed, complete: false, interrupted: [] },
      device: about.device,
      runtime: { name: "onnxruntime-web", version: about.version, timer_us: 0, telemetry: false,
        arena: true, isolated: crossOriginIsolated, cores: null, features: [] },
      conditions: { before: {}, after: {} },
      memory: { of: "WebAssembly", peak_bytes: null, reason: "nothing ran in WebAssembly, and a page cannot read the memory of WebGPU" },
      shape, rules, cells: [], baselines: [], repeat: null,
    };
    this.cells = new Map(chosen.map((configuration) =>
      [configuration, plan.cells.map((cell) => this.#cell(cell, configuration))]));
    this.result.cells = [...this.cells.values()].flat();
    if (plan.decoder) this.result.decoders = chosen.map((configuration) => this.#decoder(configuration));
    this.visits = 0;
    this.expected = chosen.reduce((sum, configuration) =>
      sum + rules.rounds * this.#able(configuration).length, rules.rounds * plan.baselines.length + 1)
      + (plan.decoder ? chosen.filter(({ missing, provider }) => !missing && provider === "wasm").length : 0);
    this.hidden = null;
    this.watch = () => this.#visibility();
  }

  #able({ missing, provider, fp16 }) {
    if (missing) return [];
    return this.plan.cells.filter((cell) => provider !== "webgpu" || fp16 || cell.dtype !== "fp16");
  }

  async start() {
    document.addEventListener("visibilitychange", this.watch);
    await this.#keepAwake();
    try {
      this.result.conditions.before = await conditions();
      for (const configuration of this.chosen) {
        if (!this.stopping) await this.#configuration(configuration);
      }
      await this.#decoders();
      await this.#again();
      this.result.run.complete = !this.stopping;
    } finally {
      document.removeEventListener("visibilitychange", this.watch);
      await this.lock?.release().catch(() => {});
    }
    for (const row of [...this.result.cells, ...this.result.baselines]) {
      if (row.samples_us) Object.assign(row, statistics(row.samples_us));
    }
    this.result.conditions.after = await conditions();
    this.result.run.finished = now();
    return this.result;
  }

  /** End early, with what there is. */
  stop() {
    this.stopping = true;
    this.resume?.();
    this.bench?.close();
  }

  /** All rounds of one configuration. */
  async #configuration(configuration) {
    const able = new Set(this.#able(configuration).map(({ id }) => id));
    const [cells, unable] = [[], []];
    for (const cell of this.cells.get(configuration)) (able.has(cell.id) ? cells : unable).push(cell);
    for (const cell of unable) {
      cell.reason = configuration.missing ?? "WebGPU here has no shader-f16, which fp16 needs";
    }
    if (!cells.length) return;
    try {
      await this.#open(configuration);
    } catch (error) {
      if (!this.stopping) for (const cell of cells) this.#fail(cell, error.message);
    }
    await this.#rounds(configuration, cells);
    this.bench.close();
  }

  /** The whole decoder in every configuration that can run it, each in a worker of its own. */
  async #decoders() {
    for (const row of this.result.decoders ?? []) {
      const configuration = this.chosen.find(({ provider, threads }) =>
        provider === row.provider_asked && threads === row.threads);
      if (this.stopping || configuration.missing || row.provider_asked !== "wasm") continue;
      this.#tell(configuration, { id: row.id }, this.plan.rules.rounds - 1);
      this.bench = new Bench(this.result.memory);
      try {
        const found = await this.#undisturbed(() =>
          this.bench.ask("decoder", { plan: this.plan, threads: row.threads }));
        Object.assign(row, found, { status: "ok", reason: null, provider_got: "wasm" });
      } catch (error) {
        if (!this.stopping) Object.assign(row, { status: "failed", reason: error.message.slice(0, 1000) });
      }
      this.bench.close();
      this.visits += 1;
      this.#tell(configuration, { id: row.id }, this.plan.rules.rounds - 1);
    }
  }

  /** A fresh worker, as memory that WebAssembly took is given back by its end only. */
  async #open({ provider, threads }) {
    this.bench = new Bench(this.result.memory);
    const { features, timer_us } = await this.bench.ask("open", { plan: this.plan, provider, threads });
    const { runtime } = this.result;
    runtime.features = [...new Set([...runtime.features, ...features])];
    runtime.timer_us = Math.max(runtime.timer_us, Number(timer_us.toPrecision(4)));
  }

  async #rounds(configuration, cells) {
    const { rounds, seed } = this.plan.rules;
    const first = configuration === this.chosen.find((one) => this.#able(one).length);
    const baselines = first ? this.plan.baselines.map(({ id, bytes }) => ({ id, bytes, threads: 1 })) : [];
    for (let round = 0; round < rounds; round++) {
      const order = shuffled([...cells, ...baselines], seed * 1009 + round * 31 + this.chosen.indexOf(configuration));
      for (const target of order) {
        if (this.stopping) break;
        if (target.status === "failed") this.visits += 1;
        else await this.#visit(configuration, target, round);
      }
    }
    this.result.baselines.push(...baselines.filter(({ samples_us }) => samples_us));
  }

  /** Measure once; again where the page was hidden meanwhile. */
  async #visit(configuration, target, round) {
    const { id, runs_per_sample: repeats } = target;
    this.#tell(configuration, target, round);
    try {
      const verb = target.status ? "visit" : "copy";
      const given = { id, repeats, check: target.status && !target.parity };
      const found = await this.#undisturbed(() => this.bench.ask(verb, given));
      if (target.status) this.first ??= { configuration, target };
      target.runs_per_sample = found.runs_per_sample;
      (target.samples_us ??= []).push(found.samples_us);
      if (found.parity) target.parity = found.parity;
      if (target.status) {
        Object.assign(target, { status: "ok", reason: null, provider_got: found.got });
        target.load_ms ??= Number(found.load_ms.toFixed(3));
      }
    } catch (error) {
      if (!this.stopping) this.#fail(target, error.message);
    }
    this.visits += 1;
    this.#tell(configuration, target, round);
  }

  /** The first cell once more, to see whether the device changed meanwhile. */
  async #again() {
    if (!this.first || this.stopping || this.first.target.status !== "ok") return;
    const { configuration, target } = this.first;
    const { id, threads, provider_asked, runs_per_sample: repeats } = target;
    const last = this.plan.rules.rounds - 1;
    this.#tell(configuration, target, last);
    try {
      await this.#open(configuration);
      const { samples_us, runs_per_sample } = await this.#undisturbed(() => this.bench.ask("visit", { id, repeats }));
      this.result.repeat = { id, threads, provider_asked, samples_us, runs_per_sample };
    } catch {
      // a result without its repeat says so
    }
    this.bench.close();
    this.visits += 1;
    this.#tell(configuration, target, last);
  }

  /** What `work` gives in a stretch of time in which the page was not hidden. */
  async #undisturbed(work) {
    for (;;) {
      await this.#shown();
      const spans = this.result.run.interrupted.length;
      const found = await work();
      if (!this.hidden && spans === this.result.run.interrupted.length) return found;
      if (this.stopping) throw new Error("stopped");
    }
  }

  #shown() {
    if (!this.hidden || this.stopping) return null;
    return new Promise((resolve) => {
      this.resume = resolve;
    });
  }

  #visibility() {
    if (document.visibilityState === "hidden") {
      this.hidden ??= now();
    } else if (this.hidden) {
      const reason = "the screen was off or another page was shown";
      this.result.run.interrupted.push({ from: this.hidden, to: now(), reason });
      this.hidden = null;
      this.#keepAwake();
      this.resume?.();
    }
    this.progress({ ...this.last, hidden: this.hidden !== null });
  }

  async #keepAwake() {
    this.lock = await navigator.wakeLock?.request("screen").catch(() => null);
  }

  #tell(configuration, target, round) {
    this.result.run.finished = now();
    this.last = { result: this.result, configuration, id: target.id, round,
      share: this.visits / this.expected, hidden: this.hidden !== null };
    this.progress(this.last);
  }

  #cell(cell, { provider, threads }) {
    const { id, policy, formulation, dtype, stage, n, queries, budget, opset, bytes, model } = cell;
    const { sha256 } = this.plan.files.find(({ file }) => file === model);
    return { id, policy, formulation, dtype, stage, n, queries, budget, opset, bytes,
      model_sha256: sha256, threads, provider_asked: provider, provider_got: null,
      status: "skipped", reason: PENDING };
  }

  #decoder({ provider, threads, missing }) {
    const { manifest, vocabulary, seed, sustained_seconds, window_seconds, check, ...same } = this.plan.decoder;
    const { sha256 } = this.plan.files.find(({ file }) => file === manifest);
    const reason = missing ?? (provider === "wasm" ? PENDING
      : "WebGPU has no buffers that are past and present at once; a decoder runs in WebAssembly");
    return { ...same, model_sha256: sha256, threads, provider_asked: provider, provider_got: null,
      status: "skipped", reason };
  }

  #fail(target, reason) {
    if (!target.status) return; // a baseline that fails is left out
    for (const key of ["samples_us", "runs_per_sample", "load_ms", "parity"]) delete target[key];
    Object.assign(target, { status: "failed", reason: reason.slice(0, 1000) });
  }
}
