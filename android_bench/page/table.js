// The table of one view.

import { sample } from "./chart.js";
import { html } from "./dom.js";
import { PENDING } from "./run.js";
import { WILD, range, shown, times, timesRange } from "./stats.js";

const WORST = 0.25; // relative error beyond which a line describes nothing
const WHY = { skipped: "not run", failed: "failed" };

/** One measurement: its time, or why there is none. */
function measured(cell, base, relative) {
  if (!cell) return html("td", {}, html("span", { class: "quiet" }, "–"));
  if (!cell.times) {
    const why = cell.reason === PENDING ? "…" : WHY[cell.status];
    return html("td", { title: cell.reason }, html("span", { class: "quiet" }, why));
  }
  const { least, us, most, p95, p99, wild } = cell.times;
  const value = relative && base ? times(us / base) : shown(us);
  const spread = relative && base ? timesRange(least / base, most / base) : range(least, most);
  const doubt = wild ? html("span", { class: "wild", title: `more than ${WILD} times the least` }, " wild") : null;
  const wrong = cell.parity && !cell.parity.passed
    ? html("span", { class: "wrong", title: cell.parity.text }, " wrong") : null;
  const scaled = (time) => (relative && base ? times(time / base) : shown(time));
  return html("td", {}, value, wrong, html("small", {}, spread, doubt),
    html("small", {}, `p95 ${scaled(p95)}, p99 ${scaled(p99)}`));
}

/**
 * Fill the table.
 * @param {HTMLTableElement} table
 * @param {object} view of series.js
 * @param {{relative: boolean, caption: string, styles: Map<string, object>}} how
 */
export function fillTable(table, { sizes, lines, base }, { relative, caption, styles }) {
  const fitted = lines.some(({ fit }) => fit);
  const head = (text, note) => html("th", { scope: "col" }, text, note ? html("small", {}, note) : null);
  const scaled = (us) => (relative && base ? times(us / base) : shown(us));
  const fit = ({ fit: found }) => {
    if (found && found.worst <= WORST) {
      return [found.t0, found.slope * 1024].map((us) => html("td", { class: "fit" }, scaled(us)));
    }
    const why = found ? `no line (off by ${Math.round(found.worst * 100)} %)` : "…";
    return [html("td", { class: "fit", colspan: 2 }, why)];
  };
  const rows = lines.map((line) => html("tr", {},
    html("th", { scope: "row" }, html("div", {},
      sample(styles.get(line.key)),
      html("span", {}, line.name, line.detail ? html("small", {}, line.detail) : null))),
    ...sizes.map((n) => measured(line.cells.get(n), base, relative)),
    ...(fitted ? fit(line) : []),
  ));
  table.replaceChildren(
    html("caption", { class: "unseen" }, caption),
    html("thead", {}, html("tr", {}, head("Policy"),
      ...sizes.map((n) => head(n.toLocaleString("en"), "slots")),
      ...(fitted ? [head("t₀", "fixed"), head("slope", "per 1,024 slots")] : []))),
    html("tbody", {}, ...rows),
  );
}
