// Runs graphs on memory that never moves, by the C functions of onnxruntime-web's WebAssembly.
//
// The public `session.run` copies every input into WebAssembly's memory and every output out of it:
// the whole cache, twice for each token. Here numbers stay where they are, and a graph may read and
// write the same ones. Sessions are made by the public way. Knows no decoder.

import load from "./ort/ort-wasm-simd-threaded.mjs";
import * as ort from "./ort/ort.wasm.min.mjs";

const here = (path) => new URL(path, import.meta.url).href;
const ON_CPU = 1; // where a tensor lies, as onnxruntime-web numbers it
// ONNX's number of each type, and the array that holds it; float16 as its bits.
const TYPES = {
  float32: [1, Float32Array], uint8: [2, Uint8Array], int8: [3, Int8Array], int32: [6, Int32Array],
  int64: [7, BigInt64Array], bool: [9, Uint8Array], float16: [10, Uint16Array],
};

let module, made; // of WebAssembly; the session made last

/** onnxruntime-web's module, as its loader gives it, and each session's handle. */
export default async function hooked(options) {
  module = await load(options);
  const create = module._OrtCreateSession;
  module._OrtCreateSession = async (...given) => (made = await create(...given));
  return module;
}

/** The bytes of WebAssembly's memory, which grows and never shrinks. */
export function heap() {
  module.getValue(0, "i8"); // looks whether it grew
  return module.HEAPU8.byteLength;
}

/** The device or the browser gives no more memory. */
export class NoMemory extends Error {}

const refused = (text) => /bad_alloc|alloc|out of memory|\bOOM\b|memory access out of bounds/i.test(text);

/** Set up, before the first graph. */
export function open(threads) {
  Object.assign(ort.env.wasm, {
    numThreads: threads, wasmPaths: { mjs: here("bound-ort.js"), wasm: here("ort/ort-wasm-simd-threaded.wasm") },
  });
  ort.env.logLevel = "error";
}

/** Numbers in WebAssembly's memory, zero at first. They stay until the page's worker ends. */
export class Numbers {
  constructor(type, shape) {
    [this.type, this.Kind] = TYPES[type];
    this.shape = shape;
    this.count = shape.reduce((a, b) => a * b, 1);
    this.bytes = this.count * this.Kind.BYTES_PER_ELEMENT;
    this.at = module._malloc(Math.max(this.bytes, 8)) >>> 0;
    if (!this.at) throw new NoMemory(`no memory for ${(this.bytes / 1e6).toFixed(1)} MB`);
    this.array.fill(this.Kind === BigInt64Array ? 0n : 0);
  }

  /** As an array, to be taken anew after every run: memory that grows is another buffer. */
  get array() {
    if (this.at + this.bytes > module.HEAPU8.length) module.getValue(this.at, "i8"); // looks again
    return new this.Kind(module.HEAPU8.buffer, this.at, this.count);
  }

  /** The first of them in another shape. */
  as(shape) {
    return Object.assign(Object.create(this), { shape });
  }
}

/** A graph that was loaded. */
export class Graph {
  /**
   * @param {Uint8Array} bytes of the graph's file
   * @param {{path: string, data: Uint8Array}[]} beside files that it takes weights from
   */
  static async load(bytes, beside = []) {
    const found = new Graph();
    try {
      found.session = await ort.InferenceSession.create(bytes, {
        executionProviders: ["wasm"], externalData: beside, enableMemPattern: false, logSeverityLevel: 4,
      });
    } catch (error) {
      const text = String(error?.message ?? error);
      throw refused(text) ? new NoMemory(text) : error;
    }
    found.handle = made;
    found.names = new Map(); // pointers to the names of ports
    return found;
  }

  get inputs() {
    return this.session.inputNames;
  }

  get outputs() {
    return this.session.outputNames;
  }

  /** Compute `outputs` from `inputs`: `Numbers` by name, which may be the same in both. */
  run(inputs, outputs) {
    const stack = module.stackSave(), tensors = [];
    try {
      const [given, found] = [inputs, outputs].map((ports) => {
        const count = Object.keys(ports).length;
        const names = module.stackAlloc(4 * count), places = module.stackAlloc(4 * count);
        Object.entries(ports).forEach(([name, numbers], i) => {
          const tensor = this.#tensor(numbers);
          tensors.push(tensor);
          module.setValue(names + 4 * i, this.#name(name), "*");
          module.setValue(places + 4 * i, tensor, "*");
        });
        return { names, places, count };
      });
      const failed = module._OrtRun(
        this.handle, given.names, given.places, given.count, found.names, found.count, found.places, 0);
      if (failed) throw lastError();
    } finally {
      for (const tensor of tensors) module._OrtReleaseTensor(tensor);
      module.stackRestore(stack);
    }
  }

  #tensor({ type, shape, at, Kind }) {
    const stack = module.stackSave();
    const dims = module.stackAlloc(4 * Math.max(shape.length, 1));
    shape.forEach((size, i) => module.setValue(dims + 4 * i, size, "i32"));
    const bytes = shape.reduce((a, b) => a * b, 1) * Kind.BYTES_PER_ELEMENT;
    const tensor = module._OrtCreateTensor(type, at, bytes, dims, shape.length, ON_CPU);
    module.stackRestore(stack);
    if (!tensor) throw lastError();
    return tensor;
  }

  #name(name) {
    if (!this.names.has(name)) {
      const size = module.lengthBytesUTF8(name) + 1, at = module._malloc(size);
      module.stringToUTF8(name, at, size);
      this.names.set(name, at);
    }
    return this.names.get(name);
  }
}

function lastError() {
  const stack = module.stackSave(), place = module.stackAlloc(8);
  module._OrtGetLastError(place, place + 4);
  const at = module.getValue(place + 4, "*");
  const text = at ? module.UTF8ToString(at) : "ONNX Runtime says no reason";
  module.stackRestore(stack);
  return refused(text) ? new NoMemory(text) : new Error(text);
}
