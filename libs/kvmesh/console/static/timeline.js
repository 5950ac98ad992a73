// One request from its arrival to its end: phases as bars, refusals and losses as marks.

import { byId, html, show, svg } from "./dom.js";
import * as format from "./format.js";

const WIDTH = 900;
const LEFT = 86;
const ROW = 34;
const PHASES = ["waiting", "prefill", "handoff", "decode"];

export async function openTimeline(name) {
  const answer = await fetch(`/console/requests/${encodeURIComponent(name)}`);
  const body = await answer.json();
  const dialog = byId("timeline");
  show(byId("timeline-body"), answer.ok ? describe(body) : html("p", { id: "timeline-title" }, body.error.message));
  if (!dialog.open) dialog.showModal();
}

function describe(request) {
  return html("div", {},
    html("h2", { id: "timeline-title" }, request.id),
    html("dl", {}, facts(request).map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value)))),
    drawing(request),
    html("div", { class: "scroll tall" }, html("table", {},
      html("thead", {}, html("tr", {}, html("th", { class: "number" }, "after"), html("th", {}, "what"), html("th", {}, "where"), html("th", {}, "why"))),
      html("tbody", {}, request.events.map((event) => html("tr", {},
        html("td", { class: "number" }, format.milliseconds(event.at_ms)),
        html("td", {}, event.what.replaceAll("_", " ")),
        html("td", {}, event.worker),
        html("td", {}, event.text)))))),
    request.error ? html("p", { class: "word", "data-word": "error" }, request.error) : null);
}

function facts(request) {
  return [
    ["state", request.stage === "ended" ? request.finish : request.stage],
    ["prompt", `${format.count(request.prompt_tokens)} tokens, ${format.count(request.cached_tokens)} cached`],
    ["output", `${format.count(request.output_tokens)} tokens`],
    ["first token", format.milliseconds(request.ttft_ms)],
    ["in all", format.milliseconds(request.elapsed_ms)],
    ["placement", request.placement === "auto" ? "not yet" : request.placement],
    ["refusals met", format.count(request.refusals)],
    ["moves", format.count(request.moves)],
  ];
}

function drawing(request) {
  const total = Math.max(request.elapsed_ms, 1);
  const x = (ms) => LEFT + ((WIDTH - LEFT - 10) * ms) / total;
  const height = PHASES.length * ROW + 30;
  const bars = request.phases.map((phase) => {
    const y = PHASES.indexOf(phase.phase) * ROW + 8;
    const width = Math.max(x(phase.end_ms) - x(phase.start_ms), 2);
    const label = `${format.milliseconds(phase.end_ms - phase.start_ms)}${phase.worker ? ` · ${phase.worker}` : ""}`;
    const inside = x(phase.start_ms) + width + 8 + label.length * 6 > WIDTH;
    return svg("g", {},
      svg("rect", { class: "phase", "data-phase": phase.phase, x: x(phase.start_ms), y, width, height: 18, rx: 3 }),
      svg("text", { x: inside ? x(phase.start_ms) - 6 : x(phase.start_ms) + width + 6, y: y + 13, "text-anchor": inside ? "end" : null }, label));
  });
  const marks = request.events
    .filter((event) => event.what === "refused" || event.what === "lost")
    .map((event) => svg("line", { class: "mark", x1: x(event.at_ms), x2: x(event.at_ms), y1: 4, y2: 30 }, svg("title", {}, `${event.what}: ${event.text}`)));
  return svg("svg", { class: "phases", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "phases of the request" },
    PHASES.map((name, i) => svg("g", {},
      svg("rect", { class: "track", x: LEFT, y: i * ROW + 8, width: WIDTH - LEFT - 10, height: 18, rx: 3 }),
      svg("text", { x: 0, y: i * ROW + 21 }, name))),
    bars, marks,
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH - 10, y1: height - 22, y2: height - 22 }),
    [0, 0.25, 0.5, 0.75, 1].map((share) => svg("text", { x: x(total * share), y: height - 6, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, format.milliseconds(total * share))));
}
