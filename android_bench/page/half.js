// float16 as 16 bits and back. Knows no plan.

const word = new Uint32Array(1);
const single = new Float32Array(word.buffer);

/** The bits of the float16 nearest to a number (ties to even). */
export function toHalf(value) {
  single[0] = value;
  const sign = (word[0] >>> 16) & 0x8000;
  const magnitude = word[0] & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00; // not a number
  if (magnitude >= 0x477ff000) return sign | 0x7c00; // beyond the largest
  if (magnitude < 0x38800000) {
    // below the smallest normal number: a multiple of 2^-24
    single[0] = Math.abs(value) + 0.5; // its last bit is then worth 2^-24; rounds to even
    return sign | (word[0] - 0x3f000000);
  }
  const odd = (magnitude >>> 13) & 1;
  return sign | ((magnitude - 0x38000000 + 0xfff + odd) >>> 13);
}

/** The number that 16 bits stand for. */
export function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >>> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
