// The chart of one view: time over slots, both axes logarithmic, a line a policy, labelled at its end.

import { svg } from "./dom.js";
import { shown, times } from "./stats.js";

const WIDE = { width: 760, height: 420, left: 62, right: 190, top: 14, bottom: 44, gap: 19 };
const NARROW = { width: 380, height: 380, left: 54, right: 106, top: 12, bottom: 40, gap: 30 };
const CROWDED = 10; // lines beyond which narrow labels have one line only

/** Round numbers within a range, sparse where it is wide. */
function ticks(low, high) {
  const of = (steps) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const step of steps) found.push(step * 10 ** power);
    }
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  };
  const choices = [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]].map(of);
  return choices.find((found) => found.length >= 3) ?? choices.at(-1);
}

/** Labels moved apart, none below the plot. */
function spread(labels, gap, bottom) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + gap);
  let floor = bottom;
  for (const label of labels.toReversed?.() ?? [...labels].reverse()) {
    label.y = Math.min(label.y, floor);
    floor = label.y - gap;
  }
  return labels;
}

/** The names at the lines' ends; what tells forms apart beside them, or below where it is narrow. */
function ends(labels, box, narrow, colours) {
  const short = narrow && labels.length > CROWDED;
  const bottom = box.height - box.bottom - (narrow ? 12 : 0);
  const right = box.width - box.right + 12;
  return spread(labels, short ? 16 : box.gap, bottom).map(({ line, y }) => svg("text", {
    class: `end ${colours.get(line.key)}`, x: right, y }, line.name,
  line.detail && !short
    ? svg("tspan", narrow ? { x: right, dy: 13 } : { dx: 5 }, line.detail) : null));
}

/**
 * Draw a view.
 * @param {HTMLElement} place
 * @param {object} view of series.js
 * @param {{relative: boolean, caption: string, colours: Map<string, string>, narrow: boolean}} how
 * @returns {boolean} whether there was anything to draw
 */
export function drawChart(place, { sizes, lines, base }, { relative, caption, colours, narrow }) {
  const drawn = lines.filter(({ points }) => points.length);
  if (sizes.length < 2 || !drawn.length || (relative && !base)) {
    place.replaceChildren();
    return false;
  }
  const box = narrow ? NARROW : WIDE;
  const unit = relative ? base : 1;
  const values = drawn.flatMap(({ points }) => points.map(([, us]) => us / unit));
  const [low, high] = [Math.min(...values) * 0.85, Math.max(...values) * 1.18];
  const scale = (from, to, start, end) => (value) =>
    start + (Math.log(value / from) / Math.log(to / from)) * (end - start);
  const x = scale(sizes[0], sizes.at(-1), box.left + 8, box.width - box.right);
  const y = scale(low, high, box.height - box.bottom, box.top);
  const named = (value) => (relative ? times(value) : shown(value)).replace(/\.0+(?=\D)|(?<=\.\d)0(?=\D)/, "");
  const grid = ticks(low, high).map((value) => svg("g", { class: "tick" },
    svg("line", { x1: box.left, x2: box.width - box.right, y1: y(value), y2: y(value) }),
    svg("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, named(value))));
  const every = narrow && sizes.length > 4 ? 2 : 1;
  const slots = sizes.filter((_, i) => i % every === 0).map((n) => svg("text", {
    class: "axis", x: x(n), y: box.height - box.bottom + 20, "text-anchor": "middle" }, n.toLocaleString("en")));
  const paths = drawn.map(({ key, points }) => svg("g", { class: `line ${colours.get(key)}` },
    svg("path", { d: points.map(([n, us], i) => `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(us / unit).toFixed(1)}`).join(" ") }),
    ...points.map(([n, us]) => svg("circle", { cx: x(n), cy: y(us / unit), r: narrow ? 3 : 3.5 }))));
  const labels = drawn.map((line) => ({ line, y: y(line.points.at(-1)[1] / unit) + 4 }));
  place.replaceChildren(svg("svg", {
    viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": `${caption} The table below has the numbers.`,
  }, ...grid, ...slots,
  svg("text", { class: "axis", x: (box.left + box.width - box.right) / 2, y: box.height - 4, "text-anchor": "middle" }, "slots held"),
  ...paths, ...ends(labels, box, narrow, colours)));
  return true;
}
