// One layer's slots in buffers that never move: a block is appended, survivors move into holes.
//
// Slots lie in any order; `positions` says which token each holds. With compact positions a survivor
// counts one position less for every older token that goes: its key is turned back in place. The
// twin of `runtime/backends/onnxruntime/slots.py`, to the bit. Knows arrays, no graph.

const { fround } = Math;

/** Rotates keys and queries back, by pairs of numbers. */
export class Turns {
  /**
   * @param {number[]} frequencies of the model, one for each pair
   * @param {number} span shifts that there can be, from 0 on
   * @param {boolean} interleaved a pair are neighbours (2i, 2i + 1); else (i, i + R/2)
   */
  constructor(frequencies, span, interleaved) {
    Object.assign(this, { pairs: frequencies.length, interleaved });
    this.cos = new Float32Array(span * this.pairs);
    this.sin = new Float32Array(span * this.pairs);
    for (let shift = 0, i = 0; shift < span; shift++) {
      for (const frequency of frequencies) {
        this.cos[i] = Math.cos(shift * frequency);
        this.sin[i++] = Math.sin(shift * frequency);
      }
    }
  }

  get bytes() {
    return this.cos.byteLength + this.sin.byteLength;
  }

  /** Turn the numbers from `at` on back by `shift`; by 0 nothing changes. */
  back(x, at, shift) {
    if (!shift) return;
    const { pairs, cos, sin } = this, step = this.interleaved ? 2 : 1, other = this.interleaved ? 1 : pairs;
    for (let i = 0, angle = shift * pairs; i < pairs; i++, angle++) {
      const first = at + i * step, a = x[first], b = x[first + other], c = cos[angle], s = sin[angle];
      x[first] = fround(fround(a * c) + fround(b * s));
      x[first + other] = fround(fround(b * c) - fround(a * s));
    }
  }
}

/** How many of the sorted `numbers` are below `limit`. */
function below(numbers, limit) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The slots of one layer. */
export class LayerSlots {
  /**
   * @param {Object<string, Numbers>} buffers keys and values [1, K, slots, D], positions [1, K, slots]
   *   and what a policy keeps of every slot; queries [1, H, w, D], the last ones
   * @param {number} budget slots of a head that stay
   * @param {?Turns} turns of its keys, where they count by their rank
   */
  constructor(buffers, budget, turns) {
    Object.assign(this, { buffers, budget, turns, held: 0 });
    [, this.heads, this.capacity] = buffers.positions.shape;
    this.moving = Object.keys(buffers).filter((name) => name !== "queries");
    this.state = this.moving.filter((name) => !["keys", "values", "positions"].includes(name));
  }

  /** Bytes of the slots in use. */
  get usedBytes() {
    return Object.entries(this.buffers).reduce((sum, [name, { bytes }]) =>
      sum + (name === "queries" ? bytes : (bytes / this.capacity) * this.held), 0);
  }

  /**
   * Take in a block, whose keys and values lie behind the slots in use.
   * @param {number} seen tokens before it
   * @param {number} length its tokens
   * @param {Object<string, TypedArray>} told state that they have from the start [1, K, T], 0 where
   *   none is given; queries [1, H, T, D]
   */
  append(seen, length, told) {
    const start = this.held;
    for (const name of ["positions", ...this.state]) {
      const x = this.buffers[name].array;
      for (let head = 0; head < this.heads; head++) {
        for (let t = 0; t < length; t++) {
          x[head * this.capacity + start + t] = name === "positions" ? seen + t : (told[name]?.[head * length + t] ?? 0);
        }
      }
    }
    if (this.buffers.queries) this.#look(told.queries, length);
    this.held = start + length;
  }

  /** Keep the last queries: older ones move towards the front. */
  #look(queries, length) {
    const { array, shape: [, heads, window, size] } = this.buffers.queries;
    const fresh = Math.min(window, length);
    for (let head = 0; head < heads; head++) {
      const at = head * window * size;
      array.copyWithin(at, at + fresh * size, at + window * size);
      array.set(queries.subarray(((head + 1) * length - fresh) * size, (head + 1) * length * size), at + (window - fresh) * size);
    }
  }

  /** Evict the slots `gone` [K, count], each head's its own; survivors behind move into the holes. */
  giveUp(gone, count) {
    const kept = this.held - count, positions = this.buffers.positions.array;
    const rows = this.moving.map((name) => {
      const { array, shape: [, , , size = 1] } = this.buffers[name];
      return { array, size };
    });
    const keys = this.buffers.keys.array, size = this.buffers.keys.shape[3];
    for (let head = 0; head < this.heads; head++) {
      const first = head * this.capacity, slots = Array.from(gone.subarray(head * count, (head + 1) * count), Number);
      const left = Int32Array.from(slots, (slot) => positions[first + slot]).sort();
      const leaving = new Set(slots);
      let source = kept;
      for (const hole of slots) {
        if (hole >= kept) continue;
        while (leaving.has(source)) source += 1;
        for (const { array, size: wide } of rows) {
          array.copyWithin((first + hole) * wide, (first + source) * wide, (first + source + 1) * wide);
        }
        source += 1;
      }
      if (!this.turns) continue;
      for (let slot = first; slot < first + kept; slot++) this.turns.back(keys, slot * size, below(left, positions[slot]));
    }
    if (this.turns && this.buffers.queries) { // newer than all that goes, or pinned with their tokens
      const { array, shape } = this.buffers.queries;
      for (let at = 0; at < array.length; at += shape[3]) this.turns.back(array, at, count);
    }
    this.held = kept;
  }
}

/** A layer's last tokens, in the order in which they were read, as a sliding window sees them. */
export class WindowSlots {
  /**
   * @param {Object<string, Numbers>} buffers keys and values [1, K, slots, D]
   * @param {number} budget tokens that stay
   */
  constructor(buffers, budget) {
    Object.assign(this, { buffers, budget, held: 0 });
    [, this.heads, this.capacity] = buffers.keys.shape;
  }

  /** Bytes of the slots in use. */
  get usedBytes() {
    return Object.values(this.buffers).reduce((sum, { bytes }) => sum + (bytes / this.capacity) * this.held, 0);
  }

  /** Take in a block, whose keys and values lie behind the slots in use. */
  append(seen, length) {
    this.held += length;
  }

  /** Move the last tokens to the front, where at least so many older ones are to go. */
  slide(least) {
    const start = this.held - this.budget;
    if (start < least) return;
    for (const { array, shape: [, , , size] } of Object.values(this.buffers)) {
      for (let head = 0; head < this.heads; head++) {
        const first = head * this.capacity;
        array.copyWithin(first * size, (first + start) * size, (first + this.held) * size);
      }
    }
    this.held = this.budget;
  }
}
