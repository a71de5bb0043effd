// onnxruntime-web's WebAssembly module with a clock around the graph's run alone.
//
// The public `session.run` copies all inputs into WebAssembly's memory each time, which can take
// longer than the graph. This module is given to onnxruntime-web as its WebAssembly loader and
// counts `OrtRun` only, several in a row where the clock is coarse: the first run allocates the
// outputs, the others write into them.

import load from "./ort/ort-wasm-simd-threaded.mjs";

/** How often a graph runs per call, and the milliseconds that took. */
export const clock = { repeats: 1, elapsed: 0 };

let loaded = null;

/** The bytes of WebAssembly's memory, which grows and never shrinks; null before it is there. */
export function heap() {
  loaded?.getValue(0, "i8"); // looks whether it grew
  return loaded?.HEAPU8.byteLength ?? null;
}

export default async function timed(options) {
  const module = await load(options);
  loaded = module;
  const run = module._OrtRun;
  module._OrtRun = (...given) => {
    const start = performance.now();
    let failed = run(...given);
    for (let i = 1; i < clock.repeats && !failed; i++) failed = run(...given);
    clock.elapsed = performance.now() - start;
    return failed;
  };
  return module;
}
