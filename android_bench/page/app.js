// The page: what it shows when, from the plan to the stored result.

import { device, limits, signs, webGpu } from "./device.js";
import { byId, html, show } from "./dom.js";
import { numbers } from "./inputs.js";
import { Run, configurations } from "./run.js";
import { policyName } from "./series.js";
import { drop, keep, kept, save, saveTable, send } from "./store.js";
import { showResult } from "./view.js";

const RETRY = 5000; // milliseconds between attempts to reach a lost server
const STAGES = ["ready", "running", "outcome"];
const SILENT = "The computer does not answer";
const TITLES = {
  real: "How fast is eviction on this phone?",
  emulated: "How fast is eviction here? (emulated)",
  host: "How fast is eviction on this computer?",
};

const state = { run: null, result: null, retry: null, saved: 0 };

function trouble(title, text, ...buttons) {
  byId("trouble-title").textContent = title;
  byId("trouble-text").textContent = text;
  byId("trouble-actions").replaceChildren(...buttons);
  show("trouble");
}

function button(text, act) {
  const made = html("button", { class: "primary" }, text);
  made.addEventListener("click", act);
  return made;
}

/** One of the page's stages, the others hidden. */
function stage(name) {
  for (const one of STAGES) show(one, one === name);
}

async function answer(path, given) {
  const response = await fetch(path, given && {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(given),
  }).catch(() => {
    throw new Error(SILENT);
  });
  if (!response.ok) throw new Error(`The computer answers ${response.status}`);
  return response.json();
}

async function begin() {
  try {
    state.plan = await answer("plan/plan.json");
    state.signs = await signs();
    state.origin = await answer("device", state.signs);
  } catch (error) {
    byId("lead").textContent = "";
    trouble("The plan could not be loaded", `${error.message}. Is kvcap android serve still running on the computer?`,
      button("Try again", () => location.reload()));
    return;
  }
  const { generator } = state.plan;
  if (numbers(1, generator.check.length).join() !== generator.check.join()) {
    byId("lead").textContent = "";
    trouble("This page does not fit the plan", "It makes other inputs than the plan asks for. Use the page and the plan of one version of kvcap.");
    return;
  }
  state.gpu = await webGpu();
  introduce();
  const earlier = await kept();
  if (earlier) offerEarlier(earlier);
  else if (location.hash === "#start") await start(); // opened by a program, such as adb
}

/** A pass takes at least this long: warm-up and samples of every visit. */
function minutes(cells, count) {
  const { warmup_seconds, min_seconds, rounds } = state.plan.rules;
  const decoder = state.plan.decoder ? state.plan.decoder.sustained_seconds + 60 : 0;
  const seconds = count * (cells * (rounds * warmup_seconds + min_seconds) * 1.4 + decoder);
  return seconds < 90 ? "about a minute" : `about ${Math.ceil(seconds / 60)} minutes`;
}

function introduce() {
  const { plan, origin } = state;
  const { source, reason, version } = origin;
  const numerals = (values) => [...new Set(values)].sort((a, b) => a - b).map((n) => n.toLocaleString("en"));
  document.title = TITLES[source];
  byId("title").textContent = TITLES[source];
  byId("lead").textContent = "After every block of a prompt, an eviction policy decides which keys and values stay. This page measures how long each takes to decide.";
  byId("origin").textContent = source === "real" ? `A real phone${state.signs.model ? `: ${state.signs.model}` : ""}`
    : source === "host" ? `Not a phone: ${reason}` : `Not a real phone: ${reason}`;
  byId("origin").classList.toggle("doubt", source !== "real");
  show("origin");
  byId("version").textContent = ` ${version}`;
  const policies = [...new Set(plan.cells.map(({ policy }) => policyName(policy)))];
  const scored = plan.cells.filter(({ stage: one }) => one === "score");
  const sizes = numerals((scored.length ? scored : plan.cells).map(({ n }) => n));
  const facts = [
    ["Policies", policies.join(", ")],
    ["Slots held", sizes.length > 1 ? `${sizes.slice(0, -1).join(", ")} and ${sizes.at(-1)}` : sizes[0]],
    ["Shape", `${plan.shape.name}: ${plan.shape.kv_heads} KV heads of ${plan.shape.head_dim}, ${[...new Set(plan.cells.map(({ dtype }) => dtype))].join(" and ")}`],
    ["Plan", `${plan.preset}, ${plan.cells.length} cells in ${plan.rules.rounds} rounds`],
    ...(plan.decoder ? [["Decoder", `${plan.decoder.model}, ${plan.decoder.policy} keeps ${plan.decoder.budget.toLocaleString("en")} slots, ${plan.decoder.dtype}`]] : []),
    ["Takes", ""],
  ];
  byId("summary").replaceChildren(...facts.flatMap(([name, text]) => [html("dt", {}, name), html("dd", {}, text)]));
  offerRows();
  byId("limits").replaceChildren(...limits(state.gpu, plan).map((text) => html("li", {}, text)));
  show("limits-section");
  stage("ready");
}

function offerRows() {
  state.configurations = configurations(state.plan, state.gpu);
  const boxes = state.configurations.map((one, i) => {
    const box = html("input", { type: "checkbox", id: `row${i}`, value: i,
      checked: one.missing || one.software || (one.provider === "wasm" && !one.planned) ? null : "", disabled: one.missing ? "" : null });
    const note = one.missing ?? (one.software ? "in software only, which is slow and says nothing of a phone"
      : one.provider === "wasm" && !one.planned ? "not asked for by the plan" : one.fp16 === false ? "fp32 only: no shader-f16 here" : one.provider === "webgpu" ? state.gpu.name : null);
    box.addEventListener("change", chosen);
    return html("label", { class: `choice${one.missing ? " off" : ""}`, for: `row${i}` }, box,
      html("span", {}, one.label, note ? html("small", {}, note) : null));
  });
  byId("rows").replaceChildren(html("legend", {}, "With"), ...boxes);
  chosen();
}

/** The ticked rows; what the plan asks for and cannot be had goes along, named in the result. */
function chosen() {
  const ticked = state.configurations.filter((_, i) => byId(`row${i}`).checked);
  byId("start").disabled = !ticked.length;
  byId("summary").lastChild.textContent = ticked.length
    ? `${minutes(state.plan.cells.length, ticked.length)}, more on a slow device` : "nothing is ticked";
  return state.configurations.filter((one, i) => (one.planned && one.missing) || byId(`row${i}`).checked);
}

function offerEarlier(result) {
  const { started, complete } = result.run;
  const measured = result.cells.filter(({ samples_us }) => samples_us).length;
  byId("earlier-text").textContent = complete
    ? `It began ${new Date(started).toLocaleString()} and was finished, but the server did not get it.`
    : `It began ${new Date(started).toLocaleString()} and was interrupted after ${measured} cells: the page was closed or reloaded.`;
  show("earlier");
  byId("earlier-send").onclick = async () => {
    show("earlier", false);
    finished(result);
  };
  byId("earlier-save").onclick = () => save(result);
  byId("earlier-drop").onclick = async () => {
    await drop();
    show("earlier", false);
    byId("title").focus();
  };
}

async function start() {
  const rows = chosen();
  history.replaceState(null, "", location.pathname); // a reload begins nothing
  show(["trouble", "earlier", "results"], false);
  stage("running");
  byId("announce").textContent = "Measuring has begun.";
  byId("stop").focus();
  const { source, reason, version } = state.origin;
  const about = { version, device: { source, source_reason: reason, ...device(state.signs), signs: state.signs } };
  state.began = performance.now();
  state.saved = -Infinity; // a run is kept from its first cell on
  state.run = new Run(state.plan, rows, about, progress);
  try {
    await finished(await state.run.start());
  } catch (error) {
    stage("ready");
    trouble("The measurement broke off", error.message);
  }
  state.run = null;
}

function progress({ result, configuration, id, round, share, hidden }) {
  if (!configuration) return;
  const cell = state.plan.cells.find((one) => one.id === id);
  byId("now").textContent = `${configuration.label} · ${cell
    ? `${policyName(cell.policy)}, ${cell.n.toLocaleString("en")} slots, ${cell.dtype}`
    : id === state.plan.decoder?.id ? "the whole decoder, which takes minutes" : "copying memory"}`;
  byId("bar").value = share;
  const percent = Math.round(share * 100);
  const spent = (performance.now() - state.began) / 1000;
  const left = Math.round((spent / share) * (1 - share));
  byId("left").textContent = share > 0.1 ? `${percent} %, ${left > 90 ? `about ${Math.round(left / 60)} min left` : left > 1 ? `about ${left} s left` : "nearly done"}` : `${percent} %`;
  const tenth = Math.floor(share * 10) * 10; // heard, so not at every step
  if (tenth) byId("announce").textContent = `${tenth} percent measured, round ${round + 1}`;
  const interrupted = result.run.interrupted.length;
  byId("paused").textContent = hidden ? "Paused while the page is hidden."
    : `The run was interrupted ${interrupted === 1 ? "once" : `${interrupted} times`} by the screen turning off or another page. What was being measured then is measured again, and the result says so.`;
  show("paused", hidden || interrupted > 0);
  const measured = result.cells.some(({ samples_us }) => samples_us);
  if (measured && !hidden) showResult(result, state.plan);
  if (hidden || (measured && performance.now() - state.saved > 2000)) { // a hidden page may never be shown again
    state.saved = performance.now();
    keep(structuredClone(result));
  }
}

async function finished(result) {
  state.result = result;
  stage("outcome");
  const { timer_us } = result.runtime;
  byId("limits").replaceChildren(...limits(state.gpu, state.plan, timer_us).map((text) => html("li", {}, text)));
  if (result.run.plan === state.plan.id) showResult(result, state.plan);
  const { complete, interrupted } = result.run;
  byId("outcome-title").textContent = !complete ? "Ended early"
    : interrupted.length ? "Done, with interruptions" : "Done";
  byId("outcome-title").focus();
  await keep(result);
  await deliver();
}

/** Send the result until the server has it or refuses it. */
async function deliver() {
  clearTimeout(state.retry);
  byId("outcome-text").textContent = "Sending the result …";
  const found = await send(state.result);
  show("send", Boolean(found.lost));
  if (found.lost) {
    const why = found.why ? `The computer could not store the result (${found.why}).` : "The computer cannot be reached.";
    byId("outcome-text").textContent = `${why} The result is kept in this browser and sent again until it is stored; you can also download it.`;
    state.retry = setTimeout(deliver, RETRY);
  } else if (found.refused) {
    byId("outcome-text").textContent = `The computer refused the result: ${found.refused}. You can still download it.`;
  } else {
    await drop();
    byId("outcome-text").replaceChildren("The result is stored on the computer as ", html("code", {}, found.file), ".");
    showFlags(found.flags, state.result.run.complete);
  }
}

const cells = (count) => `${count} ${count === 1 ? "cell" : "cells"}`;
const DOUBTS = {
  rules: () => "A quick plan: each cell is measured for less time than the full rules ask for.",
  drift: (text) => text.startsWith("took") ? `The device changed meanwhile: the first cell ${text}.`
    : `Whether the device changed meanwhile is unknown: ${text}.`,
  throttled: (text) => `The device slowed down: ${text}.`,
  spread: (text, count) => `${cells(count)} with a wild spread, which makes the median doubtful: ${text}.`,
  timer: (text, count) => `In ${cells(count)} the clock is coarse: ${text}.`,
  endpoint: (text, count) => `In ${cells(count)} not everything ran where it was asked to: ${text}.`,
  rounds: (text, count) => `${cells(count)} with fewer rounds than the plan asks for: ${text}.`,
  runs: (text, count) => `${cells(count)} with fewer runs than the plan asks for: ${text}.`,
  parity: (text, count) => `${cells(count)} with wrong values: ${text}.`,
  interrupted: (text) => `${text[0].toUpperCase()}${text.slice(1)}.`,
};

const LISTED = ["failed", "skipped"]; // below the table, cell by cell
const EARLY = ["drift", "rounds", "runs"]; // follow from having ended early, which is told

/** What kvcap doubts of the result, a sentence each kind. */
function showFlags(flags, complete) {
  const kinds = Object.groupBy ? Object.groupBy(flags, ({ kind }) => kind) : {};
  if (!Object.groupBy) for (const flag of flags) (kinds[flag.kind] ??= []).push(flag);
  const silent = complete ? LISTED : [...LISTED, ...EARLY];
  const told = Object.entries(kinds).filter(([kind]) => !silent.includes(kind));
  byId("flags").replaceChildren(...told.map(([kind, group]) => html("li", {},
    DOUBTS[kind]?.(group[0].text, group.length) ?? `${group[0].text} (${group.length} times)`)));
  show("flags", told.length > 0);
}

byId("start").addEventListener("click", start);
byId("stop").addEventListener("click", () => state.run?.stop());
byId("send").addEventListener("click", deliver);
byId("save").addEventListener("click", () => save(state.result));
byId("save-table").addEventListener("click", () => saveTable(state.result, state.plan.csv));
byId("again").addEventListener("click", () => {
  clearTimeout(state.retry);
  introduce();
  byId("title").focus();
});
addEventListener("online", () => state.retry && deliver());
begin();
