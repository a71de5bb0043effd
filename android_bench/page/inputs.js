// A cell's inputs, made by the plan's rules, the same numbers as every other runner's.
// Knows no onnxruntime: gives typed arrays, float16 as its bits.

import { toHalf } from "./half.js";

const ARRAYS = { float32: Float32Array, float16: Uint16Array, int32: Int32Array, bool: Uint8Array };

function mix(x) {
  x ^= x >>> 16;
  x = Math.imul(x, 0x7feb352d);
  x ^= x >>> 15;
  x = Math.imul(x, 0x846ca68b);
  return (x ^ (x >>> 16)) >>> 0;
}

/** Number i of the plan's generator, 0 to 2047; `start` is mix(seed). */
const hash11 = (start, i) => mix((i + start) >>> 0) >>> 21;

/** The first numbers of a seed, to hold this implementation against the plan's. */
export function numbers(seed, count) {
  const start = mix(seed);
  return Array.from({ length: count }, (_, i) => hash11(start, i));
}

export const elements = (shape) => shape.reduce((a, b) => a * b, 1);

/** Bits or value of one number in a type. */
const encoded = (value, dtype) => (dtype === "float16" ? toHalf(value) : value);

/**
 * Fill an input.
 * @param {object} port name, dtype, shape and fill, as the plan says
 * @param {(file: string) => Promise<ArrayBuffer>} load a file of the plan
 * @returns {Promise<TypedArray>} its elements, row-major
 */
export async function filled({ dtype, shape, fill }, load) {
  const count = elements(shape);
  const made = new ARRAYS[dtype](count);
  if (fill.kind === "hash") {
    const table = made.constructor.from({ length: 2048 }, (_, h) =>
      encoded(h * fill.scale + fill.offset, dtype));
    const start = mix(fill.seed);
    for (let i = 0; i < count; i++) made[i] = table[hash11(start, i)];
    return made;
  }
  if (fill.kind === "constant") return made.fill(encoded(fill.value, dtype));
  if (fill.kind === "permutation") {
    const row = shape[shape.length - 1];
    for (let i = 0; i < count; i++) {
      const j = i % row;
      // below 2^53 as long as the product is: sizes here are thousands
      made[i] = encoded(j < fill.first ? (j * fill.multiplier) % fill.first : j, dtype);
    }
    return made;
  }
  const raw = await load(fill.file); // little-endian, as every browser's machine is
  if (raw.byteLength !== made.byteLength) {
    throw new Error(`${fill.file} has ${raw.byteLength} bytes, not ${made.byteLength}`);
  }
  made.set(new ARRAYS[dtype](raw));
  return made;
}
