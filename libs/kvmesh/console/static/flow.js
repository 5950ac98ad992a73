// The mesh as a drawing: gateway, prefill side, decode side, by cluster, with what flows between.

import { show, svg } from "./dom.js";
import * as format from "./format.js";
import { byActivity } from "./order.js";

const WIDTH = 1080;
const NODE = { width: 214, height: 74, gap: 14 };
const COLUMNS = { gateway: 20, prefill: 330, decode: 760 };
const TOP = 34;
const MAX_NODES = 12;
const DOT_S = 1.6;

// Positions of the dots along their ways are kept over redraws.
const ways = new Map();
let frame = 0;

export function drawFlow(element, snapshot) {
  const plan = layout(snapshot);
  const edges = edgesOf(snapshot, plan);
  show(
    element,
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${plan.height}`,
        role: "img",
        "aria-label": summary(snapshot),
      },
      plan.clusters.map(clusterBox),
      edges.map(wayOf),
      svg("g", { class: "dots" }),
      edges.filter((edge) => edge.label).map(labelOf),
      gatewayNode(snapshot, plan),
      plan.nodes.map(workerNode),
      plan.hidden > 0
        ? svg("text", { class: "label", x: COLUMNS.prefill, y: plan.height - 10 }, `and ${plan.hidden} more workers in the table below`)
        : null,
    ),
  );
  follow(element.querySelector("svg"), edges);
}

function summary(snapshot) {
  const prefill = snapshot.workers.filter((w) => w.role !== "decode").length;
  const decode = snapshot.workers.filter((w) => w.role !== "prefill").length;
  return `Gateway with ${snapshot.open} open requests, ${prefill} prefill and ${decode} decode workers`;
}

// --- where things are ---

function layout(snapshot) {
  const clusters = [...new Set(snapshot.workers.map((worker) => worker.cluster))].sort();
  const nodes = [];
  const boxes = [];
  let y = TOP;
  let hidden = 0;
  for (const cluster of clusters) {
    const members = snapshot.workers.filter((worker) => worker.cluster === cluster);
    const shown = busiest(members);
    hidden += members.length - shown.length;
    const left = shown.filter((worker) => worker.role === "prefill");
    const right = shown.filter((worker) => worker.role !== "prefill");
    const rows = Math.max(left.length, right.length, 1);
    const height = rows * (NODE.height + NODE.gap) - NODE.gap;
    place(nodes, left, COLUMNS.prefill, y, height);
    place(nodes, right, COLUMNS.decode, y, height);
    boxes.push({ name: cluster, y: y - 26, height: height + 40 });
    y += height + 54;
  }
  const height = Math.max(y - 14, 170);
  return { nodes, clusters: boxes, hidden, height, gatewayY: height / 2 - NODE.height / 2, at: new Map(nodes.map((n) => [n.worker.id, n])) };
}

// Of each side as many as there is room for, so that neither crowds the other out.
function busiest(members) {
  if (members.length <= MAX_NODES) return members;
  const side = (isPrefill) => byActivity(members.filter((w) => (w.role === "prefill") === isPrefill)).slice(0, MAX_NODES / 2);
  const chosen = new Set([...side(true), ...side(false)]);
  return members.filter((worker) => chosen.has(worker));
}

function place(nodes, workers, x, y, height) {
  const own = workers.length * (NODE.height + NODE.gap) - NODE.gap;
  workers.forEach((worker, i) => nodes.push({ worker, x, y: y + (height - own) / 2 + i * (NODE.height + NODE.gap) }));
}

// --- what flows ---

function edgesOf(snapshot, plan) {
  const gateway = { x: COLUMNS.gateway + 176, y: plan.gatewayY + NODE.height / 2 };
  const left = (node) => ({ x: node.x, y: node.y + NODE.height / 2 - 8 });
  const right = (node) => ({ x: node.x + NODE.width, y: node.y + NODE.height / 2 - 8 });
  const edges = [];
  for (const node of plan.nodes.filter((n) => n.worker.role !== "decode")) {
    const running = flowsOf(snapshot, (flow) => flow.stage === "prefill" && flow.prefill === node.worker.id);
    edges.push({
      key: `prompt ${node.worker.id}`,
      kind: "prompt",
      d: curve(gateway, left(node)),
      weight: running + node.worker.prefill_tokens_s / 500,
    });
  }
  for (const node of plan.nodes.filter((n) => n.worker.role === "decode")) {
    // Prompts that are computed where they are decoded.
    const running = flowsOf(snapshot, (flow) => flow.stage === "prefill" && flow.prefill === node.worker.id);
    if (running === 0 && node.worker.prefill_tokens_s === 0) continue;
    edges.push({
      key: `prompt ${node.worker.id}`,
      kind: "prompt",
      d: over({ x: gateway.x, y: gateway.y - 12 }, { x: node.x, y: node.y + 16 }, plan),
      weight: running + node.worker.prefill_tokens_s / 500,
    });
  }
  for (const link of merged(snapshot.links)) {
    const from = plan.at.get(link.from);
    const to = plan.at.get(link.to);
    if (!from || !to) continue;
    const forth = to.x > from.x;
    const [start, end] = forth ? [right(from), left(to)] : [left(from), right(to)];
    edges.push({
      key: `kv ${link.from} ${link.to}`,
      kind: "kv",
      d: from.x === to.x ? around(right(from), right(to)) : curve(start, end),
      weight: link.bytes_s / 2e6 + (link.bytes_s > 0 ? 1 : 0),
      label: link.bytes_s > 0 ? `${format.bytes(link.bytes_s)}/s` : "",
      at: labelAt(start, end),
    });
  }
  for (const node of plan.nodes.filter((n) => n.worker.role !== "prefill")) {
    edges.push({
      key: `tokens ${node.worker.id}`,
      kind: "tokens",
      d: back({ x: node.x, y: node.y + NODE.height - 12 }, { x: gateway.x, y: gateway.y + 22 }, plan),
      weight: node.worker.decode_tokens_s / 40,
    });
  }
  return edges;
}

function flowsOf(snapshot, wanted) {
  return snapshot.flows.filter(wanted).reduce((sum, flow) => sum + flow.count, 0);
}

// Several kinds of channel between the same two workers are one way in the drawing.
function merged(links) {
  const byPair = new Map();
  for (const link of links) {
    const key = `${link.from}\n${link.to}`;
    const known = byPair.get(key);
    byPair.set(key, known ? { ...known, bytes_s: known.bytes_s + link.bytes_s } : link);
  }
  return [...byPair.values()];
}

function curve(from, to) {
  const bend = Math.max(40, Math.abs(to.x - from.x) * 0.5);
  const sign = to.x >= from.x ? 1 : -1;
  return `M${from.x} ${from.y}C${from.x + sign * bend} ${from.y} ${to.x - sign * bend} ${to.y} ${to.x} ${to.y}`;
}

// Crossing ways have their labels near the sender, straight ones beyond the crossings.
function labelAt(start, end) {
  const share = Math.abs(end.y - start.y) < 1 ? 0.72 : 0.3;
  const bent = share * share * (3 - 2 * share);
  return [start.x + share * (end.x - start.x), start.y + bent * (end.y - start.y) - 5];
}

// Above the prefill workers.
function over(from, to, plan) {
  const high = Math.max(TOP - 22, Math.min(...plan.nodes.map((node) => node.y)) - 16);
  return `M${from.x} ${from.y}C${from.x + 70} ${from.y} ${from.x + 60} ${high} ${COLUMNS.prefill + NODE.width / 2} ${high}S${to.x - 70} ${to.y} ${to.x} ${to.y}`;
}

function around(from, to) {
  return `M${from.x} ${from.y}C${from.x + 60} ${from.y} ${to.x + 60} ${to.y} ${to.x} ${to.y}`;
}

// Tokens go back below the prefill workers.
function back(from, to, plan) {
  const low = Math.min(plan.height - 8, Math.max(from.y, to.y) + 60);
  return `M${from.x} ${from.y}C${from.x - 90} ${from.y} ${from.x - 120} ${low} ${(from.x + to.x) / 2} ${low}S${to.x + 70} ${to.y} ${to.x} ${to.y}`;
}

// --- how it looks ---

function clusterBox(box) {
  return svg(
    "g",
    {},
    svg("rect", { class: "cluster", x: COLUMNS.prefill - 26, y: box.y, width: WIDTH - COLUMNS.prefill + 16, height: box.height, rx: 14 }),
    svg("text", { class: "cluster-name", x: WIDTH - 22, y: box.y + 17, "text-anchor": "end" }, `cluster ${box.name}`),
  );
}

function wayOf(edge) {
  return svg("path", {
    class: edge.weight > 0 ? "way active" : "way",
    "data-kind": edge.kind,
    "data-key": edge.key,
    d: edge.d,
    "stroke-width": (1 + Math.min(4, Math.sqrt(edge.weight))).toFixed(2),
  });
}

function labelOf(edge) {
  return svg("text", { class: "label", x: edge.at[0], y: edge.at[1], "text-anchor": "middle" }, edge.label);
}

function gatewayNode(snapshot, plan) {
  const waiting = flowsOf(snapshot, (flow) => flow.stage === "waiting");
  return svg(
    "g",
    { class: "node", transform: `translate(${COLUMNS.gateway} ${plan.gatewayY})` },
    svg("rect", { class: "body", width: 176, height: NODE.height, rx: 10 }),
    svg("rect", { class: "edge", width: 4, height: NODE.height - 20, x: 0, y: 10, rx: 2 }),
    svg("text", { class: "name", x: 16, y: 25 }, "gateway"),
    svg("text", { class: "fact", x: 16, y: 44 }, `${format.count(snapshot.open)} open, ${format.count(waiting)} waiting`),
    svg("text", { class: "fact", x: 16, y: 61 }, `${format.count(snapshot.ended_total)} ended`),
  );
}

function workerNode(node) {
  const { worker } = node;
  const inner = NODE.width - 32;
  const used = worker.blocks.used / worker.blocks.total;
  const cached = worker.blocks.cached / worker.blocks.total;
  const word = worker.state === "ready" ? worker.role : worker.state;
  return svg(
    "g",
    { class: "node", "data-role": worker.role, "data-state": worker.state, transform: `translate(${node.x} ${node.y})` },
    svg("rect", { class: "body", width: NODE.width, height: NODE.height, rx: 10 }),
    svg("rect", { class: "edge", width: 4, height: NODE.height - 20, x: 0, y: 10, rx: 2 }),
    svg("text", { class: "name", x: 16, y: 22 }, worker.id),
    svg("text", { class: "fact", x: NODE.width - 16, y: 22, "text-anchor": "end" }, word),
    svg("rect", { class: "bar", x: 16, y: 31, width: inner, height: 7, rx: 3.5 }),
    svg("rect", { class: "cached", x: 16 + inner * used, y: 31, width: inner * Math.min(cached, 1 - used), height: 7 }),
    svg("rect", { class: "used", x: 16, y: 31, width: inner * used, height: 7, rx: used > 0.02 ? 3.5 : 0 }),
    slots(worker, inner),
    svg("text", { class: "fact", x: 16, y: 65 }, fact(worker)),
  );
}

function fact(worker) {
  const parts = [];
  if (worker.role !== "decode") parts.push(`${format.count(worker.prefill_tokens_s)} prompt tok/s`);
  if (worker.role !== "prefill") parts.push(`${format.count(worker.decode_tokens_s)} tok/s`);
  if (worker.hit_share !== null) parts.push(`${format.percent(worker.hit_share)} hits`);
  return parts.join(" · ");
}

function slots(worker, inner) {
  const decode = worker.role !== "prefill";
  const total = decode ? worker.decode.slots : worker.prefill.slots;
  const busy = decode ? worker.decode.running + worker.decode.reserved : worker.prefill.active;
  const shown = Math.min(total, 32);
  const width = Math.min(12, inner / shown);
  const filled = Math.round((busy / total) * shown);
  return svg(
    "g",
    {},
    Array.from({ length: shown }, (_, i) =>
      svg("rect", {
        class: `slot${i < filled ? " busy" : ""}${decode ? " decode" : ""}`,
        x: 16.5 + i * width,
        y: 43.5,
        width: Math.max(width - 2, 1.5),
        height: 7,
        rx: 1.5,
      }),
    ),
  );
}

// --- what moves ---

function follow(drawing, edges) {
  for (const key of [...ways.keys()]) if (!edges.some((edge) => edge.key === key)) ways.delete(key);
  for (const edge of edges) {
    const path = drawing.querySelector(`path[data-key="${CSS.escape(edge.key)}"]`);
    const dots = edge.weight > 0 ? Math.min(8, Math.ceil(edge.weight)) : 0;
    ways.set(edge.key, { path, kind: edge.kind, dots, length: path.getTotalLength() });
  }
  if (!frame && !matchMedia("(prefers-reduced-motion: reduce)").matches) frame = requestAnimationFrame(move);
}

function move(now) {
  const group = document.querySelector(".flow .dots");
  if (group) {
    const dots = [...ways.values()].flatMap((way) =>
      Array.from({ length: way.dots }, (_, i) => {
        const share = (now / 1000 / DOT_S + i / way.dots) % 1;
        return { kind: way.kind, at: way.path.getPointAtLength(share * way.length) };
      }),
    );
    while (group.childElementCount > dots.length) group.lastChild.remove();
    while (group.childElementCount < dots.length) group.append(svg("circle", { class: "dot", r: 3 }));
    dots.forEach((dot, i) => {
      const circle = group.children[i];
      circle.dataset.kind = dot.kind;
      circle.setAttribute("cx", dot.at.x);
      circle.setAttribute("cy", dot.at.y);
    });
  }
  frame = requestAnimationFrame(move);
}
