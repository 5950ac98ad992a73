// The console: reads snapshots from the stream and passes them to the drawing modules.

import { byId } from "./dom.js";
import { drawCharts } from "./charts.js";
import { drawFlow } from "./flow.js";
import { drawBars, drawFigures, drawGroups, drawLinks, drawRequests, drawWorkers } from "./tables.js";
import { openTimeline } from "./timeline.js";
import * as format from "./format.js";

const HISTORY = 300;
const STAGES = ["waiting", "prefill", "handoff", "decode"];
let samples = [];
let latest = null;

function remember(snapshot) {
  if (snapshot.sample && samples.at(-1)?.at_s !== snapshot.sample.at_s) samples.push(snapshot.sample);
  samples = samples.slice(-HISTORY);
}

function draw(snapshot) {
  remember(snapshot);
  latest = snapshot;
  byId("model").textContent = `${snapshot.model} · KVMesh ${snapshot.version}`;
  setState(...condition(snapshot));
  drawFigures(byId("figures"), snapshot);
  drawFlow(byId("flow"), snapshot);
  drawCharts(byId("charts"), samples);
  drawGroups(byId("groups"), snapshot.groups);
  drawWorkers(byId("workers"), snapshot.workers, snapshot.gone);
  drawLinks(byId("links"), snapshot.links);
  drawRequests(byId("requests"), snapshot.requests);
  byId("flow").classList.toggle("stale", !snapshot.fresh);
  byId("worker-count").textContent = workerCount(snapshot);
  byId("refusal-rate").textContent = `${format.rate(snapshot.sample?.refusals_s ?? 0)} per second`;
  drawBars(byId("refusals"), snapshot.refusals.map((each) => [`${each.stage}: ${each.reason}`, each.count]), "", "none since the gateway started");
  drawBars(byId("stages"), stages(snapshot.flows), "stage", "no open request");
  document.body.dataset.drawn = String(snapshot.now);
}

// The mesh's state in a word, which an operator must know first.
function condition(snapshot) {
  if (!snapshot.fresh) return ["stale", "no scheduler: last known fleet"];
  const ready = snapshot.workers.filter((worker) => worker.state === "ready");
  if (ready.length === 0) return ["lost", "no worker is ready"];
  if (ready.every((worker) => worker.role === "decode")) return ["stale", "no prefill worker is ready"];
  if (ready.every((worker) => worker.role === "prefill")) return ["lost", "no decode worker is ready"];
  if (snapshot.kvmanager === false) return ["stale", "no kvmanager: cached prefixes unknown"];
  const slower = snapshot.workers.filter((worker) => worker.missing_native.length);
  if (slower.length) return ["stale", `slower, no native code: ${slower.map((worker) => worker.id).join(", ")}`];
  return ["live", "live"];
}

function workerCount(snapshot) {
  const clusters = new Set(snapshot.workers.map((worker) => worker.cluster)).size;
  const left = snapshot.gone.length ? `, ${snapshot.gone.length} left` : "";
  return `${snapshot.workers.length} in ${clusters} ${clusters === 1 ? "cluster" : "clusters"}${left}`;
}

function stages(flows) {
  const total = (stage) => flows.filter((flow) => flow.stage === stage).reduce((sum, flow) => sum + flow.count, 0);
  return flows.length ? STAGES.map((stage) => [stage, total(stage)]) : [];
}

function setState(state, text) {
  byId("state").dataset.state = state;
  byId("state").textContent = text;
}

async function start() {
  const answer = await fetch("/console/snapshot");
  if (!answer.ok) {
    setState("lost", `the gateway answered ${answer.status}`);
    return;
  }
  const snapshot = await answer.json();
  samples = snapshot.history;
  draw(snapshot);
  const stream = new EventSource("/console/events");
  // A hidden page keeps its history, and draws when it becomes visible.
  stream.addEventListener("snapshot", (event) => (document.hidden ? remember : draw)(JSON.parse(event.data)));
  stream.addEventListener("error", () => setState("lost", "connection lost, trying again"));
}

// --- light and dark ---

const scheme = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
}

function chosenTheme() {
  return localStorage.getItem("theme") ?? (scheme.matches ? "dark" : "light");
}

setTheme(chosenTheme());
scheme.addEventListener("change", () => setTheme(chosenTheme()));
byId("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", name);
  setTheme(name);
});

// --- one request ---

addEventListener("resize", () => latest && drawFlow(byId("flow"), latest));
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = byId("find-id").value.trim();
  if (name) openTimeline(name);
});
byId("requests").addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-id]");
  if (row) openTimeline(row.dataset.id);
});

start();
