// A result's cells as the lines of a table or chart. Knows no screen.

import { line, median } from "./stats.js";

const NAMES = {
  keydiff: "KeyDiff", snapkv: "SnapKV", tova: "TOVA", h2o: "H2O", dropkv: "DropKV", knorm: "K-norm",
  criticalkv: "CriticalKV", obcache: "OBCache", streaming_llm: "StreamingLLM", cake: "CAKE", andpro: "AnDPro",
  random: "Random",
};
const FORMS = { naive: "as written", stateless: "mat-vecs", inverse_norms: "norms kept", running_anchor: "running anchor" };

/** A policy's name for people. */
export const policyName = (policy) =>
  Object.entries(NAMES).reduce((name, [key, shown]) =>
    name === key || name.startsWith(`${key}-`) ? shown + name.slice(key.length) : name, policy);

/** What tells forms of one policy apart. */
export function detail({ policy, formulation, queries }, several) {
  const parts = [];
  if (several.has(policy)) parts.push(FORMS[formulation] ?? formulation.replaceAll("_", " "));
  if (queries > 0) parts.push(`${queries} ${queries === 1 ? "query" : "queries"}`);
  return parts.join(", ");
}

/**
 * A colour for every line: forms of one policy are shades of one hue.
 * @returns {Map<string, string>} class by line's key
 */
export function colours(cells) {
  const policies = [...new Set(cells.map(({ policy }) => policy))].sort((a, b) =>
    (b === "keydiff") - (a === "keydiff")); // the first hue is KeyDiff's
  const found = new Map(), shades = new Map();
  for (const { policy, formulation, queries } of cells) {
    const key = lineKey({ policy, formulation, queries });
    if (found.has(key)) continue;
    const shade = shades.get(policy) ?? 0;
    shades.set(policy, shade + 1);
    found.set(key, `hue${policies.indexOf(policy) % 8} shade${shade % 4}`);
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
    .map((cell) => ({ ...cell, us: cell.samples_us?.length ? median(cell.samples_us.flat()) : null }));
  const base = seen.find(({ id }) => id === plan.reference)?.us ?? null;
  const shown = seen.filter((cell) => cell.stage === view.stage && cell.dtype === view.dtype);
  const formOf = new Map(shown.map(({ policy, formulation }) => [policy, formulation]));
  const several = new Set(shown.filter((cell) => formOf.get(cell.policy) !== cell.formulation).map(({ policy }) => policy));
  const found = new Map();
  for (const cell of shown) {
    const key = lineKey(cell);
    if (!found.has(key)) {
      found.set(key, { key, policy: cell.policy, name: policyName(cell.policy), detail: detail(cell, several), cells: new Map() });
    }
    found.get(key).cells.set(cell.n, cell);
  }
  for (const one of found.values()) {
    one.points = [...one.cells.values()].filter(({ us }) => us).map(({ n, us }) => [n, us]);
    one.fit = view.stage === "score" ? line(one.points) : null;
  }
  const sizes = [...new Set(shown.map(({ n }) => n))].sort((a, b) => a - b);
  return { sizes, lines: [...found.values()], base };
}
