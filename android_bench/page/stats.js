// Statistics of samples, which the page shows while it measures and writes into the result.

/** A percentile, linear between the two nearest samples. */
export function percentile(samples, share) {
  const sorted = Float64Array.from(samples).sort();
  const at = share * (sorted.length - 1);
  const low = Math.floor(at);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low);
}

/** How many times its least sample a cell's 90th percentile may be; kvcap flags what is beyond. */
export const WILD = 2.5;

const PERCENTILES = [50, 90, 95, 99];

/** The fields of a row that say its samples' least and percentiles, as `runner/statistics.py` has them. */
export function statistics(rounds) {
  const samples = rounds.flat();
  return Object.fromEntries([["min_us", percentile(samples, 0)],
    ...PERCENTILES.map((share) => [`p${share}_us`, percentile(samples, share / 100)])]);
}

/** What is shown of a cell, in µs; null where it has no samples. */
export function summary({ samples_us: rounds }) {
  if (!rounds?.flat().length) return null;
  const { min_us: least, p50_us: us, p90_us: most, p95_us: p95, p99_us: p99 } = statistics(rounds);
  return { least, us, most, p95, p99, wild: most > WILD * least };
}

/**
 * The line t0 + slope · n through points [n, µs], by least squares of relative errors, t0 not below
 * 0: kvcap's report draws the same.
 * @returns {{t0: number, slope: number, worst: number} | null} µs, µs per slot and the largest
 *   relative error of the line; null below three sizes
 */
export function line(points) {
  if (new Set(points.map(([n]) => n)).size < 3) return null;
  let w = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const [n, us] of points) {
    const weight = 1 / (us * us);
    w += weight;
    x += weight * n;
    y += weight * us;
    xx += weight * n * n;
    xy += weight * n * us;
  }
  let slope = (w * xy - x * y) / (w * xx - x * x);
  let t0 = (y - slope * x) / w;
  if (t0 < 0) [t0, slope] = [0, xy / xx];
  const worst = Math.max(...points.map(([n, us]) => Math.abs((t0 + slope * n) / us - 1)));
  return { t0, slope, worst };
}

const unit = (us) => (us >= 1e6 ? [1e6, "s"] : us >= 1000 ? [1000, "ms"] : [1, "µs"]);

/** Microseconds for people: three digits, and the unit that suits. */
export const shown = (us) => `${digits(us / unit(us)[0])} ${unit(us)[1]}`;

/** From one time to another, in one unit. */
export function range(least, most) {
  const [size, name] = unit(most);
  return `${digits(least / size)}–${digits(most / size)} ${name}`;
}

/** A ratio for people. */
export const times = (ratio) => `${digits(ratio)}×`;

/** From one ratio to another. */
export const timesRange = (least, most) => `${digits(least)}–${digits(most)}×`;

const digits = (value) =>
  value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
