// The console: takes snapshots from the stream and hands them to those who draw.

import { byId } from "./dom.js";
import { drawCharts } from "./charts.js";
import { drawFlow } from "./flow.js";
import { drawBars, drawFigures, drawLinks, drawRequests, drawWorkers } from "./tables.js";
import { openTimeline } from "./timeline.js";
import * as format from "./format.js";

const HISTORY = 300;
const STAGES = ["waiting", "prefill", "handoff", "decode"];
let samples = [];

function remember(snapshot) {
  if (snapshot.sample && samples.at(-1)?.at_s !== snapshot.sample.at_s) samples.push(snapshot.sample);
  samples = samples.slice(-HISTORY);
}

function draw(snapshot) {
  remember(snapshot);
  byId("model").textContent = `${snapshot.model} · KVMesh ${snapshot.version}`;
  setState(snapshot.fresh ? "live" : "stale", snapshot.fresh ? "live" : "no scheduler: last known fleet");
  drawFigures(byId("figures"), snapshot);
  drawFlow(byId("flow"), snapshot);
  drawCharts(byId("charts"), samples);
  drawWorkers(byId("workers"), snapshot.workers);
  drawLinks(byId("links"), snapshot.links);
  drawRequests(byId("requests"), snapshot.requests);
  byId("worker-count").textContent = `${snapshot.workers.length} in ${new Set(snapshot.workers.map((w) => w.cluster)).size} cluster(s)`;
  byId("refusal-rate").textContent = `${format.rate(snapshot.sample?.refusals_s ?? 0)} per second`;
  drawBars(byId("refusals"), snapshot.refusals.map((each) => [`${each.stage}: ${each.reason}`, each.count]), "", "none since the gateway started");
  drawBars(byId("stages"), stages(snapshot.flows), "stage", "no open request");
  document.body.dataset.drawn = String(snapshot.now);
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
  // A page that nobody sees keeps its history, and draws when it is looked at.
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
