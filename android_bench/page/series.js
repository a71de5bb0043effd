// A result's cells as the lines of a table or chart. Knows no screen.

import { line, summary } from "./stats.js";

const NAMES = {
  keydiff: "KeyDiff", snapkv: "SnapKV", tova: "TOVA", h2o: "H2O", dropkv: "DropKV", knorm: "K-norm",
  criticalkv: "CriticalKV", obcache: "OBCache", streaming_llm: "StreamingLLM", cake: "CAKE", andpro: "AnDPro",
  lagkv: "LagKV", expected_attention: "Expected Attention", rkv: "R-KV", compactor: "Compactor", cur: "CUR",
  capkv: "CapKV", balanced: "Balanced", random: "Random",
};

/** A policy's name for people. */
export const policyName = (policy) =>
  Object.entries(NAMES).reduce((name, [key, shown]) =>
    name === key || name.startsWith(`${key}-`) ? shown + name.slice(key.length) : name, policy);

/** What tells a policy's lines apart: formulation and queries, by kvcap's own names as in its report. */
export function detail({ policy, formulation, queries }) {
  const parts = [];
  if (formulation !== "naive" || policy === "keydiff") parts.push(formulation);
  if (queries > 0) parts.push(`${queries} ${queries === 1 ? "query" : "queries"}`);
  return parts.join(", ");
}

/**
 * How every line is told from others: forms of one policy are shades of one hue with dashes of their
 * own, and no two lines in sight have the same marker.
 * @returns {Map<string, {colour: string, dash: number, mark: number}>} by line's key; colour is a class
 */
export function styles(cells) {
  const policies = [...new Set(cells.map(({ policy }) => policy))].sort((a, b) =>
    (b === "keydiff") - (a === "keydiff")); // the first hue is KeyDiff's
  const found = new Map(), shades = new Map();
  for (const { policy, formulation, queries } of cells) {
    const key = lineKey({ policy, formulation, queries });
    if (found.has(key)) continue;
    const shade = shades.get(policy) ?? 0;
    shades.set(policy, shade + 1);
    const place = policies.indexOf(policy);
    found.set(key, { colour: `hue${place % 8} shade${shade % 4}`, dash: place + shade, mark: found.size });
  }
  return found;
}

const lineKey = ({ policy, formulation, queries }) => `${policy} ${formulation} ${queries}`;

/** The choices that a result's cells leave, in the order they come. */
export function choices(cells) {
  const of = (value) => [...new Set(cells.map(value))];
  return {
    configuration: of((cell) => `${cell.provider_asked} ${cell.threads}`),
    stage: of((cell) => cell.stage),
    dtype: of((cell) => cell.dtype),
  };
}

/**
 * The lines of one view.
 * @param {object[]} cells of a result
 * @param {object} plan
 * @param {{configuration: string, stage: string, dtype: string}} view
 * @returns {{sizes: number[], lines: object[], base: number|null}} per line: name, detail, points
 *   by size and fit; base is the reference's µs
 */
export function lines(cells, plan, view) {
  const seen = cells
    .filter((cell) => `${cell.provider_asked} ${cell.threads}` === view.configuration)
    .map((cell) => ({ ...cell, times: summary(cell) }));
  const base = seen.find(({ id }) => id === plan.reference)?.times?.us ?? null;
  const shown = seen.filter((cell) => cell.stage === view.stage && cell.dtype === view.dtype);
  const found = new Map();
  for (const cell of shown) {
    const key = lineKey(cell);
    if (!found.has(key)) {
      found.set(key, { key, policy: cell.policy, formulation: cell.formulation, name: policyName(cell.policy), detail: detail(cell), cells: new Map() });
    }
    found.get(key).cells.set(cell.n, cell);
  }
  for (const one of found.values()) {
    one.points = [...one.cells.values()].filter(({ times }) => times).map(({ n, times }) => ({ n, ...times }));
    one.fit = view.stage === "score" ? line(one.points.map(({ n, us }) => [n, us])) : null;
  }
  const sizes = [...new Set(shown.map(({ n }) => n))].sort((a, b) => a - b);
  return { sizes, lines: [...found.values()], base };
}
