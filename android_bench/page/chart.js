// The chart of one view: time over slots, both axes logarithmic, a line a policy, labelled at its end.
// A line is told from others by its marker and its dash, not only by its colour.

import { svg } from "./dom.js";
import { shown, times } from "./stats.js";

const WIDE = { width: 760, height: 440, left: 62, right: 224, top: 14, bottom: 44, gap: 19 };
const NARROW = { width: 380, height: 380, left: 60, right: 130, top: 12, bottom: 40, gap: 30 };
const CROWDED = 10; // lines beyond which narrow labels have one line only

const DASHES = ["none", "5 3", "1.5 3", "7 2.5 1.5 2.5"];
const polygon = (corners, radius, turn) => Array.from({ length: corners }, (_, i) => {
  const angle = (2 * Math.PI * i) / corners + turn;
  return `${i ? "L" : "M"}${(radius * Math.sin(angle)).toFixed(2)} ${(-radius * Math.cos(angle)).toFixed(2)}`;
}).join("") + "Z";
const MARKS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z", polygon(4, 5, Math.PI / 4), polygon(3, 5.4, 0), polygon(4, 5.2, 0),
  polygon(3, 5.4, Math.PI), "M-1.5-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5Z", polygon(5, 5, 0),
  "M0-2l3-3l2 2l-3 3l3 3l-2 2l-3-3l-3 3l-2-2l3-3l-3-3l2-2Z", polygon(6, 4.8, 0), "M-5-2h10v4h-10Z",
  "M-2-5h4v10h-4Z", polygon(3, 5.4, Math.PI / 2),
];

const mark = (style, x, y, wild) => svg("path", { class: wild ? "mark wild" : "mark",
  d: MARKS[style.mark % MARKS.length], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
const dash = (style) => DASHES[style.dash % DASHES.length];

/** A line's dash and marker, for a table's row. */
export const sample = (style) => svg("svg", { class: `key line ${style.colour}`, viewBox: "0 0 44 12", "aria-hidden": "true" },
  svg("path", { class: "course", d: "M0 6H44", "stroke-dasharray": dash(style) }), mark(style, 22, 6));

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
function ends(labels, box, narrow) {
  const short = narrow && labels.length > CROWDED;
  const bottom = box.height - box.bottom - (narrow ? 12 : 0);
  const right = box.width - box.right + 30;
  return spread(labels, short ? 16 : box.gap, bottom).map(({ line, style, y }) => svg("g", { class: style.colour },
    mark(style, right - 10, y - 4),
    svg("text", { class: "end", x: right, y }, line.name, line.detail && !short
      ? svg("tspan", narrow ? { x: right, dy: 13 } : { dx: 5 }, line.detail) : null)));
}

/**
 * Draw a view.
 * @param {HTMLElement} place
 * @param {object} view of series.js
 * @param {{relative: boolean, caption: string, styles: Map<string, object>, narrow: boolean}} how
 * @returns {boolean} whether there was anything to draw
 */
export function drawChart(place, { sizes, lines, base }, { relative, caption, styles, narrow }) {
  const drawn = lines.filter(({ points }) => points.length);
  if (sizes.length < 2 || !drawn.length || (relative && !base)) {
    place.replaceChildren();
    return false;
  }
  const box = narrow ? NARROW : WIDE;
  const unit = relative ? base : 1;
  const values = drawn.flatMap(({ points }) => points.flatMap(({ least, most }) => [least / unit, most / unit]));
  const [low, high] = [Math.min(...values) * 0.9, Math.max(...values) * 1.1];
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
  const beside = Math.min(3, 14 / drawn.length); // so that bars stand side by side
  const all = drawn.map((line, i) => {
    const style = styles.get(line.key);
    const at = line.points.map(({ n, least, us, most, wild }) => ({ wild, x: x(n) + (i - (drawn.length - 1) / 2) * beside,
      low: y(least / unit), y: y(us / unit), high: y(most / unit) }));
    return { line, style, at, y: at.at(-1).y + 4 };
  });
  const paths = all.map(({ style, at }) => svg("g", { class: `line ${style.colour}` },
    svg("path", { class: "course", "stroke-dasharray": dash(style),
      d: at.map((one, j) => `${j ? "L" : "M"}${one.x.toFixed(1)} ${one.y.toFixed(1)}`).join(" ") }),
    svg("path", { class: "bar", d: at.map((one) => `M${(one.x - 3).toFixed(1)} ${one.low.toFixed(1)}h6m-3 0V${one.high.toFixed(1)}m-3 0h6`).join("") }),
    ...at.map((one) => mark(style, one.x, one.y, one.wild))));
  place.replaceChildren(svg("svg", {
    viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": `${caption} The table below has the numbers.`,
  }, ...grid, ...slots,
  svg("text", { class: "axis", x: (box.left + box.width - box.right) / 2, y: box.height - 4, "text-anchor": "middle" }, "slots held"),
  ...paths, ...ends(all, box, narrow)));
  return true;
}
