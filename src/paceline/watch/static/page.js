"use strict";
// Everything that comes from a run is shown as text, never as markup.

const token = location.hash.slice(1);
const byId = (id) => document.getElementById(id);
const RETRY_MS = 2000;
const WIDTH = 360, HEIGHT = 150, LEFT = 60, RIGHT = 8, TOP = 12, BOTTOM = 28;
const COLUMNS = [
  ["worker", "rank", String], ["state", "state", String], ["steps", "steps", count],
  ["samples/s", "rate", brief], ["waiting", "wait", percent], ["staleness", "staleness", brief],
  ["sent", "bytes", size], ["loss", "loss", brief],
];
const NUMBERS = [
  ["loss", "loss", brief], ["accuracy", "accuracy", brief], ["samples/s", "rate", brief],
  ["waiting", "wait", percent], ["staleness", "staleness", brief],
  ["spread of the models", "spread", brief], ["steps", "steps", count], ["sent", "bytes", size],
];

function brief(value) {
  if (value === null) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : 3;
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return value.toLocaleString("en", {maximumFractionDigits: digits});
}
function count(value) { return value === null ? "–" : value.toLocaleString("en"); }
function percent(value) {
  return value === null ? "–" : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}
function size(value) {
  if (value === null) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let power = 0;
  for (; value >= 1000 && power < units.length - 1; power++) value /= 1000;
  return `${power ? value.toFixed(1) : value} ${units[power]}`;
}
function seconds(value) {
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function show(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
function make(parent, tag, attributes = {}, text = "") {
  const svg = parent.namespaceURI.endsWith("svg") || tag === "svg";
  const space = svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return parent.appendChild(element);
}

// The whole run ------------------------------------------------------------------------------------

function showHead(run) {
  show(byId("name"), run.name);
  document.title = `${run.state === "running" ? percent(run.progress) : run.state} ${run.name}`;
  show(byId("state"), run.state);
  byId("state").className = `badge ${{running: "running", ended: ""}[run.state] ?? "bad"}`;
  const virtual = run.world === "simulated" ? "virtual time" : "";
  const told = [run.strategy, run.world, `${seconds(run.t)} ${virtual}`.trim()];
  show(byId("about"), told.filter(Boolean).join(" · "));
  byId("progress-line").hidden = run.progress === null;
  byId("progress").value = run.progress ?? 0;
  let left = "";
  if (run.left_s !== null) {
    const ends = new Date(Date.now() + run.left_s * 1000).toLocaleTimeString();
    left = `, ${seconds(run.left_s)} left, until ${ends}`;
  }
  show(byId("progress-text"), `${percent(run.progress)} done${left}`);
}

function showNumbers(totals) {
  const list = byId("numbers");
  for (const [label, name, format] of NUMBERS) {
    let value = byId(`number-${name}`);
    if (!value) {
      const box = make(list, "div");
      make(box, "dt", {}, label);
      value = make(box, "dd", {id: `number-${name}`});
    }
    show(value, format(totals[name]));
  }
}

// Charts -------------------------------------------------------------------------------------------

const charts = new Map();

function newChart(name) {
  const figure = make(byId("charts"), "figure");
  const caption = make(figure, "figcaption");
  make(caption, "span", {}, name);
  const last = make(caption, "span");
  const svg = make(figure, "svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"});
  const bottom = HEIGHT - BOTTOM;
  make(svg, "line", {class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom});
  const chart = {
    last, svg,
    band: make(svg, "path", {class: "band"}), line: make(svg, "path", {class: "line"}),
    high: make(svg, "text", {x: LEFT - 8, y: TOP + 6, "text-anchor": "end"}),
    low: make(svg, "text", {x: LEFT - 8, y: bottom, "text-anchor": "end"}),
    begin: make(svg, "text", {x: LEFT, y: HEIGHT - 6}),
    end: make(svg, "text", {x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end"}),
    details: make(figure, "details"), rows: [],
  };
  make(chart.details, "summary", {}, "Values");
  const table = make(chart.details, "table", {"aria-label": name});
  const head = make(make(table, "thead"), "tr");
  for (const label of ["time", "mean", "least", "greatest"]) make(head, "th", {scope: "col"}, label);
  chart.body = make(table, "tbody");
  chart.details.addEventListener("toggle", () => showValues(chart));
  charts.set(name, chart);
  return chart;
}

function showChart({name, unit, rows}) {
  const chart = charts.get(name) ?? newChart(name);
  const format = unit === "share" ? percent : brief;
  Object.assign(chart, {rows, format});
  const begin = rows[0][0], end = rows[rows.length - 1][0];
  let low = Math.min(...rows.map((row) => row[2])), high = Math.max(...rows.map((row) => row[3]));
  const flat = high === low;
  const x = (t) => LEFT + (end > begin ? (t - begin) / (end - begin) : 0) * (WIDTH - LEFT - RIGHT);
  const y = (v) => TOP + (flat ? 0.5 : (high - v) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const point = (t, v) => `${x(t).toFixed(1)} ${y(v).toFixed(1)}`;
  const upper = rows.map((row) => point(row[0], row[3]));
  const lower = rows.map((row) => point(row[0], row[2])).reverse();
  chart.band.setAttribute("d", `M${upper.concat(lower).join("L")}Z`);
  chart.line.setAttribute("d", `M${rows.map((row) => point(row[0], row[1])).join("L")}`);
  const last = format(rows[rows.length - 1][1]);
  show(chart.last, last);
  show(chart.high, format(high));
  show(chart.low, flat ? "" : format(low));
  show(chart.begin, seconds(begin));
  show(chart.end, end > begin ? seconds(end) : "");
  chart.svg.setAttribute("aria-label",
    `${name} from ${seconds(begin)} to ${seconds(end)}: between ${format(low)} and ` +
    `${format(high)}, at last ${last}`);
  if (chart.details.open) showValues(chart);
}

function showValues({details, body, rows, format}) {
  if (!details.open) return;
  const step = Math.max(1, Math.ceil(rows.length / 12));
  const chosen = rows.filter((_, index) => (rows.length - 1 - index) % step === 0);
  body.replaceChildren();
  for (const [t, mean, low, high] of chosen) {
    const line = make(body, "tr");
    make(line, "th", {scope: "row"}, seconds(t));
    for (const value of [mean, low, high]) make(line, "td", {}, format(value));
  }
}

// Workers and events -------------------------------------------------------------------------------

const GONE = ["lost", "starting again", "stopped", "set aside"];
const states = new Map();

function showWorkers(workers) {
  const head = byId("columns"), body = byId("rows");
  if (!head.children.length) {
    for (const [label] of COLUMNS) make(head, "th", {scope: "col", role: "columnheader"}, label);
  }
  for (const worker of workers) {
    let line = byId(`worker-${worker.rank}`);
    if (!line) {
      line = make(body, "tr", {id: `worker-${worker.rank}`, role: "row"});
      COLUMNS.forEach(([label], index) => make(line, index ? "td" : "th",
        {"data-label": label, ...(index ? {role: "cell"} : {role: "rowheader", scope: "row"})}));
    }
    COLUMNS.forEach(([, name, format], index) => show(line.children[index], format(worker[name])));
    line.className = GONE.includes(worker.state) ? "gone" : "";
    const before = states.get(worker.rank);
    if (before !== undefined && before !== worker.state && worker.state !== "ended") {
      show(byId("notice"), `Worker ${worker.rank}: ${worker.state}`);
    }
    states.set(worker.rank, worker.state);
  }
  const known = new Set(workers.map((worker) => `worker-${worker.rank}`));
  for (const line of [...body.children]) if (!known.has(line.id)) line.remove();
}

let eventsShown = "";

function showEvents(events) {
  const key = JSON.stringify(events);
  if (key === eventsShown) return;
  eventsShown = key;
  byId("no-events").hidden = events.length > 0;
  byId("events").replaceChildren();
  for (const event of [...events].reverse()) make(byId("events"), "li", {}, event.text);
}

// Stopping -----------------------------------------------------------------------------------------

function showStop(stop) {
  byId("stop").disabled = !stop.possible;
  if (!stop.possible) ask(false);
  const text = "The run makes a checkpoint, ends, and can be resumed from there.";
  show(byId("stop-text"), stop.possible ? text : `Not possible: ${stop.why}.`);
}
function ask(open) {
  byId("sure").hidden = !open;
  byId("stop").hidden = open;
}
async function stopRun() {
  ask(false);
  show(byId("stopping"), "Stopping …");
  try {
    const reply = await request("stop", "POST");
    const answer = await reply.json();
    show(byId("stopping"), answer.error ?? "The run makes a checkpoint and ends.");
  } catch (error) {
    show(byId("stopping"), `The run was not asked: ${error.message}`);
  }
}

// Following ----------------------------------------------------------------------------------------

function request(path, method = "GET") {
  return fetch(path, {method, headers: {Authorization: `Bearer ${token}`}, cache: "no-store"});
}

function showRun(run) {
  showHead(run);
  showNumbers(run.totals);
  run.charts.forEach(showChart);
  showWorkers(run.workers);
  showEvents(run.events);
  showStop(run.stop);
}

async function follow() {
  const reply = await request("events");
  if (reply.status === 401) {
    show(byId("notice"), "Open the address that paceline has printed: its end is the key.");
    return false;
  }
  if (!reply.ok) throw new Error(`the server says ${reply.status}`);
  show(byId("notice"), "");
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const messages = (text + part.value).split("\n\n");
    text = messages.pop();
    const data = messages.filter((message) => message.startsWith("data: ")).pop();
    if (data) showRun(JSON.parse(data.slice(6)));
  }
  return true;
}

async function main() {
  byId("stop").addEventListener("click", () => { ask(true); byId("no").focus(); });
  byId("no").addEventListener("click", () => { ask(false); byId("stop").focus(); });
  byId("yes").addEventListener("click", stopRun);
  for (;;) {
    try {
      if (!await follow()) return;
    } catch {
      // the server has ended, or the network is away: what is shown stays
    }
    show(byId("notice"), "Not connected. What you see is the last that was known.");
    byId("stop").disabled = true;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

main();
