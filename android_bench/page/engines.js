// The two ways that onnxruntime-web runs a graph: on the CPU as WebAssembly, and by WebGPU.
// Knows how to load a model, feed it and time it; knows no plan, no rounds and no statistics.

import { fromHalf } from "./half.js";

const here = (path) => new URL(path, import.meta.url).href;

/** WebAssembly: the clock runs inside, around the graph alone. */
class WebAssemblyEngine {
  async open(threads) {
    this.ort = await import("./ort/ort.wasm.min.mjs");
    const { clock, heap } = await import("./timed-ort.js");
    Object.assign(this, { clock, heap });
    Object.assign(this.ort.env.wasm, {
      numThreads: threads,
      wasmPaths: { mjs: here("timed-ort.js"), wasm: here("ort/ort-wasm-simd-threaded.wasm") },
    });
    return ["simd", ...(threads > 1 ? ["threads"] : [])];
  }

  async load(bytes) {
    const session = await this.ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
    return { session, got: "wasm" };
  }

  feed({ name, dtype, shape }, data) {
    return [name, new this.ort.Tensor(dtype, data, shape), () => {}];
  }

  async run(session, feeds, repeats) {
    this.clock.repeats = repeats;
    const outputs = await session.run(feeds);
    return { ms: this.clock.elapsed, outputs };
  }
}

/** WebGPU, whose memory no page can read: keys and values wait in the GPU's memory; a run ends when its outputs can be read. */
class WebGpuEngine {
  heap = () => null;

  async open() {
    this.ort = await import("./ort/ort.webgpu.min.mjs");
    const name = "ort/ort-wasm-simd-threaded.asyncify";
    Object.assign(this.ort.env.wasm, {
      numThreads: 1,
      wasmPaths: { mjs: here(`${name}.mjs`), wasm: here(`${name}.wasm`) },
    });
    const adapter = await navigator.gpu.requestAdapter();
    return ["webgpu", ...(adapter?.features.has("shader-f16") ? ["shader-f16"] : [])];
  }

  /** Nodes without a WebGPU kernel run on the CPU, which the endpoint got must say. */
  async load(bytes) {
    const create = (fallback) =>
      this.ort.InferenceSession.create(bytes, {
        executionProviders: ["webgpu"],
        logSeverityLevel: 4,
        extra: { session: { disable_cpu_ep_fallback: fallback ? "0" : "1" } },
      });
    try {
      return { session: await create(false), got: "webgpu" };
    } catch {
      return { session: await create(true), got: "webgpu+wasm" };
    }
  }

  async feed({ name, dtype, shape }, data) {
    if (!dtype.startsWith("float")) return [name, new this.ort.Tensor(dtype, data, shape), () => {}];
    const device = await this.ort.env.webgpu.device;
    const buffer = device.createBuffer({
      size: Math.ceil(data.byteLength / 16) * 16,
      usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
      mappedAtCreation: true,
    });
    new data.constructor(buffer.getMappedRange(), 0, data.length).set(data);
    buffer.unmap();
    const tensor = this.ort.Tensor.fromGpuBuffer(buffer, { dataType: dtype, dims: shape });
    return [name, tensor, () => buffer.destroy()];
  }

  async run(session, feeds, repeats) {
    let outputs;
    const start = performance.now();
    for (let i = 0; i < repeats; i++) outputs = await session.run(feeds);
    return { ms: performance.now() - start, outputs };
  }
}

export const engine = (provider) =>
  provider === "webgpu" ? new WebGpuEngine() : new WebAssemblyEngine();

/** Outputs as plain numbers and as they came, float16 as its bits. */
export function decoded(outputs) {
  const read = ([name, { type, data }]) => {
    if (type !== "float16") return [name, { numbers: data, raw: data }];
    const raw = new Uint16Array(data.buffer, data.byteOffset, data.length);
    return [name, { numbers: Float32Array.from(raw, fromHalf), raw }];
  };
  return Object.fromEntries(Object.entries(outputs).map(read));
}
