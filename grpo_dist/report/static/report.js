"use strict";
// The page's data is embedded in it, or asked of `grpo-dist report --serve`. Text of models is only ever set as text.
const $ = (id) => document.getElementById(id);
const embedded = document.getElementById("data-overview") !== null;
const AT_ONCE = 60; // responses that are drawn before "show more"
const TABS = ["curves", "rollouts", "rows", "time", "config"];
let overview, step, drawn = AT_ONCE, tab = TABS[0];

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

async function data(name) {
  if (!embedded) {
    const answer = await fetch(`data/${name}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  const bytes = Uint8Array.from(atob($(`data-${name}`).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const items = (texts) => texts.map((text) => make("li", { textContent: text }));

// --- curves ---------------------------------------------------------------------------------------------------------
function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["ink", "edge", "card"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function smoothed(values) {
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - 9), i + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

function drawCharts() {
  const { ink, edge, card } = colours();
  const axis = { gridcolor: edge, zerolinecolor: edge, linecolor: edge };
  const smooth = $("smooth").checked;
  overview.charts.forEach((chart, i) => {
    if (chart.tab !== tab) return; // Plotly needs to see how wide its place is
    if (!$(`plot-${i}`)) {
      const plot = make("div", { className: "plot", id: `plot-${i}` });
      const note = make("p", { className: "note", textContent: chart.note });
      $(tab).querySelector(".grid").append(make("div", { className: "card" }, make("h3", { textContent: chart.title }), note, plot));
    }
    const traces = chart.figure.data.map((trace) =>
      smooth && String(trace.mode).startsWith("lines") ? { ...trace, y: smoothed(trace.y) } : trace);
    const given = chart.figure.layout;
    const layout = {
      ...given, margin: { l: 52, r: 8, t: 8, b: 30 }, font: { color: ink, size: 11 },
      paper_bgcolor: card, plot_bgcolor: card, hoverlabel: { bgcolor: card, bordercolor: edge, font: { color: ink }, align: "left" },
      xaxis: { ...axis, ...given.xaxis }, yaxis: { ...axis, ...given.yaxis },
      legend: { orientation: "h", y: -0.12, font: { size: 10 } }, showlegend: traces.length > 1, uirevision: "kept",
    };
    Plotly.react(`plot-${i}`, traces, layout, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"], ...(matchMedia("(hover: none)").matches && { displayModeBar: false }) });
  });
}

function drawHead() {
  document.title = overview.title;
  $("title").textContent = overview.title;
  $("facts").replaceChildren(...overview.facts.flatMap(([name, value]) =>
    [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  $("problems").hidden = !overview.problems.length;
  $("problems").querySelector("ul").replaceChildren(...items(overview.problems));
  $("alarms").hidden = !overview.alarms.length;
  $("alarms").querySelector("ol").replaceChildren(...overview.alarms.map((alarm) =>
    make("li", {}, make("b", { textContent: `step ${alarm.step}: ` }), alarm.text)));
  $("waited").textContent = overview.waited;
  drawRows();
  drawTable($("against"), ...overview.against);
  const { runs, keys } = overview.config;
  $("config").querySelector("p").textContent = runs.length < 2 ? "All keys of the run." : "Keys whose values differ.";
  drawTable($("config").querySelector("table"), ["key", ...runs], ...keys.map(({ key, values }) => [key, ...values]));
}

function drawTable(table, head = [], ...lines) {
  table.replaceChildren(
    make("tr", {}, ...head.map((name) => make("th", { textContent: name }))),
    ...lines.map((line) => make("tr", {}, ...line.map((cell) => make("td", {}, cell)))));
}

function drawRows() {
  const head = ["kind", "probability", "passed", "ground truth", "other answer", "prompt and three responses"];
  drawTable($("rows").querySelector("table"), head, ...(overview.named ?? []).map((row) => {
    const told = make("details", {}, make("summary", { textContent: row.prompt.trim() }), make("ul", {}, ...items(row.examples)));
    return [row.kind, row.probability.toFixed(2), `${row.passed} of ${row.responses}`, row.truth, `${row.says} (${row.saying} times)`, told];
  }));
}

function showTab() {
  const empty = { rollouts: !overview.steps.length, rows: !overview.named?.length };
  const shown = TABS.filter((name) => !empty[name]), asked = location.hash.slice(1);
  tab = shown.includes(asked) ? asked : TABS[0];
  for (const name of TABS) {
    const link = document.querySelector(`nav a[href="#${name}"]`);
    link.hidden = !shown.includes(name);
    link.setAttribute("aria-current", name === tab ? "page" : "false");
    $(name).hidden = name !== tab;
  }
  drawCharts();
}

// --- rollouts -------------------------------------------------------------------------------------------------------
const at = (values, i) => (Array.isArray(values) ? values[i] : values);
const own = (response, i) => response.mask === undefined || at(response.mask, i) === 1;

function meanOf(response, name, measure) {
  if (response[name] === undefined || !response.tokens) return null;
  let sum = 0, count = 0;
  response.tokens.forEach((_, i) => { if (own(response, i)) { sum += measure(at(response[name], i) ?? 0); count += 1; } });
  return count ? sum / count : null;
}

const shown = (value) => (typeof value === "number" ? String(Number(value.toPrecision(3))) : String(value));
const length = (response) => (response.tokens ? response.tokens.length : response.output.length);
const ORDERS = {
  "as sampled": null,
  "best first": (response) => -(response.score ?? -Infinity),
  "worst first": (response) => response.score ?? Infinity,
  "furthest from the reference": (response) => -(meanOf(response, "kl", (value) => value) ?? -Infinity),
  "sampler and trainer differ most": (response) => -(meanOf(response, "mismatch", Math.abs) ?? -Infinity),
  "cut off first": (response) => (response.truncated ? 0 : 1),
  "longest first": (response) => -length(response),
};
const COLOURS = {
  "advantage": ["advantages", 1.5, "green: made more likely; red: less likely"],
  "trainer against sampler": ["mismatch", 0.5, "log-prob of the trainer less that of the sampler, nats; green: the trainer's is higher"],
  "against the reference": ["kl", 2, "log-prob of the policy less that of the reference, nats; green: the policy's is higher"],
  "surprise": ["log_probs", 5, "log-prob of the token, nats; red: unlikely"],
  "nothing": [null, 1, ""],
};

function highlighted(text, query) {
  if (!query) return [text];
  const parts = [], lower = text.toLowerCase();
  let from = 0;
  for (let found; (found = lower.indexOf(query, from)) !== -1 && lower.length === text.length; from = found + query.length) {
    parts.push(text.slice(from, found), make("mark", { textContent: text.slice(found, found + query.length) }));
  }
  return [...parts, text.slice(from)];
}

function tokens(response) {
  const [name, full, meaning] = COLOURS[$("colour").value];
  const body = make("div", { className: "text", title: meaning });
  if (!response.tokens) {
    body.append(...highlighted(response.output, $("search").value.toLowerCase()));
    return body;
  }
  response.tokens.forEach((piece, i) => {
    if (response.branches?.includes(i)) body.append(make("div", { className: "note", textContent: "a branch:" }));
    const token = make("span", { textContent: step.pieces[piece] });
    const lines = [`token ${i + 1}`];
    for (const [label, key] of [["log-prob", "log_probs"], ["advantage", "advantages"], ["trainer - sampler", "mismatch"], ["policy - reference", "kl"]]) {
      if (response[key] !== undefined) lines.push(`${label} ${shown(at(response[key], i))}`);
    }
    if (!own(response, i)) { token.className = "environment"; lines.push("written by the environment"); }
    const value = name && own(response, i) ? at(response[name], i) : null;
    if (value) {
      const strength = Math.min(Math.abs(value) / full, 1) * 0.65;
      token.style.background = `rgba(var(--${value > 0 ? "good" : "bad"}), ${strength})`;
    }
    token.title = lines.join("\n");
    body.append(token);
  });
  return body;
}

function card(response, group, withPrompt) {
  const numbers = make("div", { className: "numbers" });
  const add = (name, value, className = "") =>
    numbers.append(make("span", { className }, `${name} `, make("b", { textContent: shown(value) })));
  add("score", response.score ?? "none");
  if (response.advantage !== undefined) add("advantage", response.advantage);
  for (const [name, value] of Object.entries(response.extra ?? {})) add(name, value);
  if (response.tokens) add("tokens", response.tokens.length);
  const far = meanOf(response, "kl", (value) => value);
  if (far !== null) add("KL", far);
  if (response.versions) add(response.versions.length > 1 ? "weights of versions" : "weights of version", response.versions.join(" to "));
  if (response.truncated) numbers.append(make("span", { className: "flag", textContent: "cut off" }));
  if (response.failure) numbers.append(make("span", { className: "flag", textContent: response.failure }));
  const prompt = withPrompt ? [make("p", { className: "note", textContent: `${group.input.trim().slice(-200)} (${group.uid})` })] : [];
  return make("article", { className: "card" }, numbers, ...prompt, tokens(response));
}

// The words that a chat template puts before each message, as labels; other prompts as they are.
function turns(text) {
  const role = /^(system|user|assistant|tool)$/;
  if (!role.test(text.split("\n", 1)[0])) return [text];
  return text.trimEnd().split("\n").map((line) =>
    role.test(line) ? make("span", { className: "role", textContent: line }) : `${line}\n`);
}

function drawRollouts() {
  const query = $("search").value.toLowerCase(), all = $("group").value === "";
  let found = step.groups.filter((group) => all || group.uid === $("group").value)
    .flatMap((group) => group.responses.map((response) => [response, group]));
  if (query) found = found.filter(([response, group]) => `${group.input}\n${response.output}`.toLowerCase().includes(query));
  const order = ORDERS[$("sort").value];
  if (order) found = found.map((pair) => [order(pair[0]), pair]).sort((a, b) => a[0] - b[0]).map(([, pair]) => pair);
  const some = found.slice(0, drawn);
  const total = step.groups.reduce((sum, group) => sum + group.responses.length, 0);
  const without = step.pieces.length ? "" : "; their tokens are not recorded";
  $("found").textContent = `${found.length} of ${total} responses${found.length > some.length ? `, ${some.length} shown` : ""}${without}`;
  const group = step.groups.find((each) => each.uid === $("group").value);
  $("prompt").replaceChildren(...(group ? [make("div", { className: "card" }, make("h3", { textContent: "Prompt" }),
    ...(group.images ?? []).map((src) => make("img", { src, alt: "an image of the prompt" })),
    make("div", { className: "text" }, ...turns(group.input)),
    make("p", { className: "note", textContent: `ground truth: ${group.gts}` }))] : []));
  $("responses").replaceChildren(...some.map(([response, from]) => card(response, from, all)));
  $("more").hidden = found.length <= some.length;
}

async function openStep() {
  const before = $("group").value;
  step = await data(`step-${$("step").value}`);
  const label = (group) => group.input.trim().split("\n").filter((line) => line.trim() && line !== "assistant").pop() ?? group.uid;
  $("step-problems").replaceChildren(...items(step.problems));
  $("group").replaceChildren(make("option", { value: "", textContent: "all prompts" }), ...step.groups.map((group) =>
    make("option", { value: group.uid, textContent: `${label(group).slice(0, 60)} (${group.uid})` })));
  const spread = (group) => {
    const scores = group.responses.map((response) => response.score ?? NaN).filter((score) => !Number.isNaN(score));
    return Math.max(...scores) - Math.min(...scores);
  };
  const first = step.groups.find((group) => spread(group) > 0) ?? step.groups[0]; // one that teaches something
  $("group").value = step.groups.some((group) => group.uid === before) ? before : first?.uid ?? "";
  drawn = AT_ONCE;
  drawRollouts();
}

async function drawSteps() {
  if (!overview.steps.length) return;
  const latest = $("step").options.length && $("step").selectedIndex === $("step").options.length - 1;
  const before = $("step").value, last = String(overview.steps[overview.steps.length - 1]);
  $("step").replaceChildren(...overview.steps.map((number) => make("option", { value: number, textContent: number })));
  $("step").value = before && !latest && overview.steps.includes(Number(before)) ? before : last;
  if ($("step").value !== before) await openStep();
}

async function refresh() {
  overview = await data("overview");
  drawHead();
  showTab();
  await drawSteps();
  $("state").textContent = embedded ? overview.note ?? "" : `live; last read ${new Date().toLocaleTimeString()}`;
}

async function main() {
  for (const [id, names] of [["sort", ORDERS], ["colour", COLOURS]]) {
    $(id).replaceChildren(...Object.keys(names).map((name) => make("option", { value: name, textContent: name })));
  }
  addEventListener("hashchange", showTab);
  $("smooth").addEventListener("change", drawCharts);
  $("step").addEventListener("change", openStep);
  for (const id of ["group", "sort", "colour"]) $(id).addEventListener("change", () => { drawn = AT_ONCE; drawRollouts(); });
  $("search").addEventListener("input", () => {
    drawn = AT_ONCE;
    if ($("search").value) $("group").value = "";
    drawRollouts();
  });
  $("more").addEventListener("click", () => { drawn += AT_ONCE; drawRollouts(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  await refresh();
  document.body.dataset.ready = "yes";
  if (!embedded) setInterval(() => refresh().catch((error) => { $("state").textContent = `the server does not answer: ${error.message}`; }), 5000);
}

main().catch((error) => { $("state").textContent = `the report cannot be shown: ${error.message}`; throw error; });
