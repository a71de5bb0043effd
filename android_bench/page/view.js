// The part of the page that shows results: choices, chart, table, what was not run.

import { drawChart } from "./chart.js";
import { byId, html, show } from "./dom.js";
import { PENDING } from "./run.js";
import { choices, lines, policyName, styles } from "./series.js";
import { WILD } from "./stats.js";
import { fillTable } from "./table.js";

const STAGES = { score: "Score", evict: "Score and evict" };
const configurationName = (key) => {
  const [provider, threads] = key.split(" ");
  return provider === "webgpu" ? "WebGPU" : `WebAssembly, ${threads} thread${threads === "1" ? "" : "s"}`;
};
const LABELS = {
  configuration: ["Runs with", (key) => configurationName(key).replace("WebAssembly, ", "")],
  stage: ["Stage", (stage) => STAGES[stage] ?? stage],
  dtype: ["Type", (dtype) => dtype],
  measure: ["Shown as", (measure) => (measure === "relative" ? "relative" : "time")],
};

const narrow = matchMedia("(max-width: 640px)");
const chosen = { measure: "absolute" };
let latest = null, offered = "";

/** The radio buttons, made anew only where the choices changed. */
function offer(options) {
  if (offered === JSON.stringify(options)) return;
  offered = JSON.stringify(options);
  byId("views").replaceChildren(...Object.entries(options).filter(([, values]) => values.length > 1)
    .map(([name, values]) => html("fieldset", {}, html("legend", {}, LABELS[name][0]),
      ...values.map((value) => {
        const input = html("input", { type: "radio", name, value, checked: value === chosen[name] ? "" : null });
        input.addEventListener("change", () => {
          chosen[name] = value;
          render();
        });
        return html("label", {}, input, html("span", {}, LABELS[name][1](value)));
      }))));
}

/** The cell that is 1× in words. */
function referenceName({ cells, reference }) {
  const { policy, n, dtype } = cells.find(({ id }) => id === reference);
  return `${policyName(policy)} at ${n.toLocaleString("en")} slots in ${dtype}`;
}

/** One sentence for each reason why cells have no numbers. */
function unmeasured(cells) {
  const groups = new Map();
  for (const cell of cells.filter(({ status, reason }) => status !== "ok" && reason !== PENDING)) {
    const text = cell.status === "failed" ? `${policyName(cell.policy)} failed: ${cell.reason}` : cell.reason;
    const key = `${configurationName(`${cell.provider_asked} ${cell.threads}`)}: ${text}`;
    groups.set(key, (groups.get(key) ?? 0) + 1);
  }
  for (const { policy, stage, n, parity } of cells) {
    if (parity && !parity.passed) groups.set(`${policyName(policy)}, ${stage} at ${n} slots gives wrong values: ${parity.text}`, 1);
  }
  return [...groups].map(([text, count]) => html("li", {}, `${text}${count > 1 ? ` (${count} cells)` : ""}`));
}

/** What the formulations in sight mean, in the plan's words. */
function explain({ formulations = {} }, { lines: drawn }) {
  const seen = new Set(drawn.filter(({ detail }) => detail).map(({ formulation }) => formulation));
  const known = Object.entries(formulations).filter(([name]) => seen.has(name) && seen.size > 1);
  byId("formulations").replaceChildren(...known.flatMap(([name, text]) =>
    [html("dt", {}, name), html("dd", {}, text)]));
  show("formulations", known.length > 0);
}

function render() {
  const { result, plan } = latest;
  const options = choices(result.cells);
  for (const [name, values] of Object.entries(options)) {
    if (!values.includes(chosen[name])) chosen[name] = values[0];
  }
  offer({ ...options, measure: ["absolute", "relative"] });
  const view = lines(result.cells, plan, chosen);
  const relative = chosen.measure === "relative";
  const what = `${configurationName(chosen.configuration)}, ${chosen.dtype}: median ${relative ? `relative to ${referenceName(plan)}` : "time of one run"}, over slots held.`;
  const how = { relative, styles: latest.styles, caption: what, narrow: narrow.matches };
  byId("caption").textContent = drawChart(byId("chart"), view, how) ? `${what} Both axes are logarithmic. Bars go from the least sample to the 90th percentile; a hollow point's spread is wild.` : what;
  fillTable(byId("table"), view, how);
  byId("fit-note").textContent = view.lines.some(({ fit }) => fit)
    ? "t₀ and slope are a straight line through the medians: t₀ is what a run costs however few slots there are." : "";
  byId("spread-note").textContent = `Below each median: from the least sample to the 90th percentile; the 95th and 99th. A spread is wild where that is more than ${WILD} times the least.`;
  explain(plan, view);
  const reasons = unmeasured(result.cells);
  byId("skipped").replaceChildren(...reasons);
  show("skipped", reasons.length > 0);
}

/** Show a result, whole or on its way. */
export function showResult(result, plan) {
  latest = { result, plan, styles: styles(plan.cells) };
  show("results");
  render();
  showDecoders(result.decoders ?? []);
}

const digits = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
const middle = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];

/** A row for each number of threads that a whole decoder was timed with. */
function showDecoders(decoders) {
  const timed = decoders.filter(({ status }) => status === "ok");
  show("decoders", timed.length > 0);
  const head = ["Threads", "First token", "Writes", "Reads", "Holds"];
  const rows = timed.map((row) => {
    const tokens = row.token_us.flat(), mean = tokens.reduce((a, b) => a + b) / tokens.length;
    return html("tr", {}, html("th", { scope: "row" }, row.threads,
      row.parity.passed ? null : html("small", { class: "wrong" }, "wrong")),
    ...[[`${digits(middle(row.first_ms))} ms`, `${row.prompt_tokens.toLocaleString("en")} tokens`],
      [`${digits(1e6 / mean)} tokens/s`, `after ${row.prompt_tokens.toLocaleString("en")}`],
      [`${digits((row.long_tokens * 1000) / middle(row.long_ms))} tokens/s`, `${row.long_tokens.toLocaleString("en")}, ${row.evicting_blocks} blocks evict`],
      [`${digits(row.held_bytes / 1e6)} MB`, `weights ${digits(row.weights_bytes / 1e6)} MB`],
    ].map(([text, note]) => html("td", {}, text, html("small", {}, note))));
  });
  byId("decoders-table").replaceChildren(
    html("thead", {}, html("tr", {}, ...head.map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, ...rows));
  const drifts = timed.filter(({ sustained }) => sustained.length > 1).map(({ threads, sustained }) => {
    const speeds = sustained.map(({ tokens, seconds }) => tokens / seconds), change = speeds.at(-1) / speeds[0] - 1;
    return `${threads} thread${threads > 1 ? "s" : ""}: ${digits(speeds[0])} tokens/s at first, ${digits(speeds.at(-1))} at last (${change > 0 ? "+" : ""}${Math.round(change * 100)} %).`;
  });
  byId("sustained").textContent = drifts.length ? `Writing on and on. ${drifts.join(" ")}` : "";
}

narrow.addEventListener("change", () => latest && render());
