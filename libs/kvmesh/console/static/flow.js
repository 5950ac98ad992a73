// The mesh as a drawing: gateway, prefill and decode workers by cluster, and the flows between.

import { show, svg } from "./dom.js";
import * as format from "./format.js";
import { NARROW, NODE, WIDE, curve, labelAt, layout, waysOf } from "./places.js";

const DOT_S = 1.6;

// Positions of the dots along their paths; redraws keep them.
const ways = new Map();
let frame = 0;

export function drawFlow(element, snapshot) {
  const plan = layout(snapshot, element.clientWidth);
  const edges = edgesOf(snapshot, plan);
  show(
    element,
    svg(
      "svg",
      {
        viewBox: `0 0 ${plan.form.width} ${plan.height}`,
        role: "img",
        "aria-label": summary(snapshot),
      },
      plan.clusters.map((box) => clusterBox(box, plan.form)),
      edges.map(wayOf),
      svg("g", { class: "dots" }),
      edges.filter((edge) => edge.label).map(labelOf),
      gatewayNode(snapshot, plan),
      plan.nodes.map((node) => workerNode(node, plan.form)),
      plan.hidden > 0 ? remark(plan, plan.height - 10, `and ${plan.hidden} more workers in the table below`) : null,
      plan.nodes.length === 0 ? remark(plan, plan.form.top + 40, "no worker is registered: requests wait until their deadline") : null,
    ),
  );
  follow(element.querySelector("svg"), edges);
}

function summary(snapshot) {
  const prefill = snapshot.workers.filter((w) => ["prefill", "hybrid"].includes(w.role)).length;
  const decode = snapshot.workers.filter((w) => ["decode", "hybrid"].includes(w.role)).length;
  return `Gateway with ${snapshot.open} open requests, ${prefill} prefill and ${decode} decode workers`;
}

// --- flows ---

function edgesOf(snapshot, plan) {
  const ways = waysOf(plan);
  const left = (node) => ({ x: node.x, y: node.y + NODE.height / 2 - 8 });
  const right = (node) => ({ x: node.x + plan.form.node, y: node.y + NODE.height / 2 - 8 });
  const edges = [];
  for (const node of plan.nodes.filter((n) => ["prefill", "hybrid"].includes(n.worker.role))) {
    const running = flowsOf(snapshot, (flow) => flow.stage === "prefill" && flow.prefill === node.worker.id);
    edges.push({
      key: `prompt ${node.worker.id}`,
      kind: "prompt",
      d: ways.toPrefill(left(node)),
      weight: running + node.worker.prefill_tokens_s / 500,
    });
  }
  for (const node of plan.nodes.filter((n) => n.worker.role === "decode")) {
    // Prompts that are computed on their decode worker.
    const running = flowsOf(snapshot, (flow) => flow.stage === "prefill" && flow.prefill === node.worker.id);
    if (running === 0 && node.worker.prefill_tokens_s === 0) continue;
    edges.push({
      key: `prompt ${node.worker.id}`,
      kind: "prompt",
      d: ways.toDecode(node),
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
      d: from.x === to.x ? ways.beside(right(from), right(to)) : curve(start, end),
      weight: link.bytes_s / 2e6 + (link.bytes_s > 0 ? 1 : 0),
      label: ways.hasLabels && link.bytes_s > 0 ? `${format.bytes(link.bytes_s)}/s` : "",
      at: labelAt(start, end),
    });
  }
  for (const node of plan.nodes.filter((n) => ["decode", "hybrid"].includes(n.worker.role))) {
    edges.push({
      key: `tokens ${node.worker.id}`,
      kind: "tokens",
      d: ways.back(node),
      weight: node.worker.decode_tokens_s / 40,
    });
  }
  return edges;
}

function flowsOf(snapshot, wanted) {
  return snapshot.flows.filter(wanted).reduce((sum, flow) => sum + flow.count, 0);
}

// Channels of several kinds between the same two workers are drawn as one path.
function merged(links) {
  const byPair = new Map();
  for (const link of links) {
    const key = `${link.from}\n${link.to}`;
    const known = byPair.get(key);
    byPair.set(key, known ? { ...known, bytes_s: known.bytes_s + link.bytes_s } : link);
  }
  return [...byPair.values()];
}

// --- drawing ---

function remark(plan, y, text) {
  return svg("text", { class: "label", x: plan.form.prefill, y }, text);
}

// Names of pods differ only at their end.
function shortened(name, most) {
  return name.length <= most ? name : `…${name.slice(1 - most)}`;
}

function clusterBox(box, form) {
  return svg(
    "g",
    {},
    svg("rect", { class: "cluster", x: form.cluster, y: box.y, width: form.width - form.cluster - (form === WIDE ? 10 : 6), height: box.height, rx: 14 }),
    svg("text", { class: "cluster-name", x: form.width - 22, y: box.y + 17, "text-anchor": "end" }, `cluster ${box.name}`),
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
    { class: "node", transform: `translate(${plan.gateway.x} ${plan.gateway.y})` },
    svg("rect", { class: "body", width: plan.gateway.width, height: NODE.height, rx: 10 }),
    svg("rect", { class: "edge", width: 4, height: NODE.height - 20, x: 0, y: 10, rx: 2 }),
    svg("text", { class: "name", x: 16, y: 25 }, "gateway"),
    svg("text", { class: "fact", x: 16, y: 44 }, `${format.count(snapshot.open)} open, ${format.count(waiting)} waiting`),
    svg("text", { class: "fact", x: 16, y: 61 }, `${format.count(snapshot.ended_total)} ended`),
  );
}

function workerNode(node, form) {
  const { worker } = node;
  const inner = form.node - 32;
  const used = worker.blocks.used / worker.blocks.total;
  const cached = worker.blocks.cached / worker.blocks.total;
  const word = worker.state === "ready" ? worker.role : worker.state;
  return svg(
    "g",
    { class: "node", "data-role": worker.role, "data-state": worker.state, transform: `translate(${node.x} ${node.y})` },
    svg("title", {}, worker.fault ? `${worker.id}: ${worker.fault}` : worker.id),
    svg("rect", { class: "body", width: form.node, height: NODE.height, rx: 10 }),
    svg("rect", { class: "edge", width: 4, height: NODE.height - 20, x: 0, y: 10, rx: 2 }),
    svg("text", { class: "name", x: 16, y: 22 }, shortened(worker.id, form.name)),
    svg("text", { class: "fact", x: form.node - 16, y: 22, "text-anchor": "end" }, word),
    svg("rect", { class: "bar", x: 16, y: 31, width: inner, height: 7, rx: 3.5 }),
    svg("rect", { class: "cached", x: 16 + inner * used, y: 31, width: inner * Math.min(cached, 1 - used), height: 7 }),
    svg("rect", { class: "used", x: 16, y: 31, width: inner * used, height: 7, rx: used > 0.02 ? 3.5 : 0 }),
    slots(worker, inner),
    svg("text", { class: "fact", x: 16, y: 65 }, fact(worker, form)),
  );
}

function fact(worker, form) {
  const prompt = format.count(worker.prefill_tokens_s);
  const output = format.count(worker.decode_tokens_s);
  const speeds = {
    prefill: form === NARROW ? `${prompt} tok/s` : `${prompt} prompt tok/s`,
    decode: `${output} tok/s`,
    hybrid: `${prompt} + ${output} ${form === NARROW ? "/s" : "tok/s"}`,
  };
  const parts = [speeds[worker.role]];
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

// --- animation ---

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
