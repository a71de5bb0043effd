// Whether a graph gives what the policy's own code gave, by the checks that the plan names.
// Knows no onnxruntime: takes plain numbers.

import { elements } from "./inputs.js";

const MARK = 1e30; // numbers beyond are marks, such as that of a pinned slot

/** The values against the file's; marks are counted only. */
function values(numbers, expected) {
  if (numbers.length !== expected.length) {
    return { error: null, text: `${numbers.length} numbers in place of ${expected.length}` };
  }
  let error = 0, marks = 0;
  for (let i = 0; i < numbers.length; i++) {
    const here = Math.abs(numbers[i]) > MARK, there = Math.abs(expected[i]) > MARK;
    marks += Number(here) - Number(there);
    const difference = here || there ? 0 : Math.abs(numbers[i] - expected[i]);
    if (!(difference <= error)) error = difference; // also where it is no number
    if (Number.isNaN(error)) return { error: null, text: "not a number" };
  }
  if (marks) return { error: null, text: "another number of marks" };
  return { error };
}

/** The kept slots against 2 (must stay), 1 (may) and 0 (must go). */
function slots(kept, shape, allowed) {
  const rows = shape[shape.length - 1], heads = elements(shape) / rows;
  const n = allowed.length / heads;
  for (let head = 0; head < heads; head++) {
    const seen = new Uint8Array(n);
    for (let row = 0; row < rows; row++) {
      const slot = Number(kept[head * rows + row]);
      if (!(slot >= 0 && slot < n)) return { error: null, text: `slot ${slot} of ${n}` };
      if (seen[slot]) return { error: null, text: `slot ${slot} is kept twice` };
      if (!allowed[head * n + slot]) return { error: null, text: `slot ${slot} had to go` };
      seen[slot] = 1;
    }
    for (let slot = 0; slot < n; slot++) {
      if (allowed[head * n + slot] === 2 && !seen[slot]) {
        return { error: null, text: `slot ${slot} had to stay` };
      }
    }
  }
  return { error: 0 };
}

/** Each row to the bit that of the input's kept slot. */
function rows(output, source, kept, shape) {
  const [, , keptRows] = shape, heads = shape[0] * shape[1];
  const width = elements(shape) / (heads * keptRows);
  const n = source.length / (heads * width);
  for (let head = 0; head < heads; head++) {
    for (let row = 0; row < keptRows; row++) {
      const from = (head * n + Number(kept[head * keptRows + row])) * width;
      const to = (head * keptRows + row) * width;
      for (let i = 0; i < width; i++) {
        if (output[to + i] !== source[from + i]) {
          return { error: null, text: `row ${row} of head ${head} is not its slot's` };
        }
      }
    }
  }
  return { error: 0 };
}

/** Expected numbers in the order of the kept slots. */
function bySlot(expected, kept, shape) {
  const keptRows = shape[shape.length - 1], heads = elements(shape) / keptRows;
  const n = expected.length / heads;
  return Float32Array.from({ length: heads * keptRows }, (_, i) =>
    expected[Math.floor(i / keptRows) * n + Number(kept[i])]);
}

/**
 * Check all outputs of a cell.
 * @param {object} cell of the plan
 * @param {Object<string, {numbers: ArrayLike<number>, raw: TypedArray}>} outputs by name, decoded
 *   and as they came
 * @param {Object<string, TypedArray>} inputs by name, as they were given
 * @param {(file: string) => Promise<ArrayBuffer>} load a file of the plan
 * @returns {Promise<{passed: boolean, error: number|null, allowed: number, text?: string}>} of the
 *   worst output
 */
export async function parity(cell, outputs, inputs, load) {
  const kept = cell.outputs.find((port) => port.check.kind === "slots");
  const keptSlots = kept && outputs[kept.name].raw;
  let worst = { passed: true, error: 0, allowed: 0 };
  for (const { name, shape, check } of cell.outputs) {
    const { numbers, raw } = outputs[name];
    const allowed = check.allowed ?? 0;
    let found;
    if (check.kind === "slots") {
      found = slots(raw, shape, new Uint8Array(await load(check.file)));
      if (found.error === null) return { passed: false, error: null, allowed, text: `${name}: ${found.text}` };
    } else if (check.kind === "rows") {
      found = rows(raw, inputs[check.of], keptSlots, shape);
    } else {
      const expected = new Float32Array(await load(check.file));
      found = values(numbers, check.kind === "values" ? expected : bySlot(expected, keptSlots, shape));
    }
    const passed = found.error !== null && found.error <= allowed;
    if (!passed) {
      const text = found.text ?? `differs by ${found.error.toPrecision(3)}, allowed ${allowed.toPrecision(3)}`;
      return { passed, error: found.error, allowed, text: `${name}: ${text}` };
    }
    if (check.kind !== "slots" && check.kind !== "rows" && found.error >= worst.error) {
      worst = { passed, error: found.error, allowed };
    }
  }
  return worst;
}
