// Positions of the drawing's parts, and the paths between them.

import { byActivity } from "./order.js";

export const NODE = { height: 74, gap: 14 };

// Layout of a wide page, and of a phone's page, which has the gateway above the workers.
export const WIDE = { width: 1080, node: 214, name: 17, gateway: { x: 20, width: 176 }, prefill: 330, decode: 760, cluster: 304, top: 34 };
export const NARROW = { width: 400, node: 168, name: 11, gateway: { x: 18, y: 4, width: 364 }, prefill: 18, decode: 214, cluster: 6, top: 126 };
const NARROW_BELOW = 620;
const MAX_NODES = 12;

// Positions for a snapshot, on an element of the given width in pixels.
export function layout(snapshot, width) {
  const form = width < NARROW_BELOW ? NARROW : WIDE;
  const clusters = [...new Set(snapshot.workers.map((worker) => worker.cluster))].sort();
  const nodes = [];
  const boxes = [];
  let y = form.top;
  let hidden = 0;
  for (const cluster of clusters) {
    const members = snapshot.workers.filter((worker) => worker.cluster === cluster);
    const shown = busiest(members);
    hidden += members.length - shown.length;
    const left = shown.filter((worker) => worker.role === "prefill");
    const right = shown.filter((worker) => worker.role !== "prefill");
    const rows = Math.max(left.length, right.length, 1);
    const height = rows * (NODE.height + NODE.gap) - NODE.gap;
    place(nodes, left, form.prefill, y, height);
    place(nodes, right, form.decode, y, height);
    boxes.push({ name: cluster, y: y - 26, height: height + 40 });
    y += height + 54;
  }
  const height = Math.max(y - 14, form.top + 136);
  const gateway = { ...form.gateway, y: form.gateway.y ?? height / 2 - NODE.height / 2 };
  return { form, nodes, clusters: boxes, hidden, height, gateway, at: new Map(nodes.map((n) => [n.worker.id, n])) };
}

// Shows as many workers of each side as fit, so that neither side displaces the other.
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

// --- paths ---

export function waysOf(plan) {
  return plan.form === NARROW ? downward(plan) : sideways(plan);
}

// The gateway is left of the workers.
function sideways(plan) {
  const gateway = { x: plan.gateway.x + plan.gateway.width, y: plan.gateway.y + NODE.height / 2 };
  return {
    hasLabels: true,
    toPrefill: (to) => curve(gateway, to),
    toDecode: (node) => over({ x: gateway.x, y: gateway.y - 12 }, { x: node.x, y: node.y + 16 }, plan),
    beside: (from, to) => around(from, to, 60),
    back: (node) => back({ x: node.x, y: node.y + NODE.height - 12 }, { x: gateway.x, y: gateway.y + 22 }, plan),
  };
}

// The gateway is above them: prefill paths go down at the left edge, all others at the right.
function downward(plan) {
  const { gateway, form } = plan;
  const bottom = gateway.y + NODE.height;
  const edge = (node, y) => ({ x: node.x + form.node, y: node.y + y });
  const down = (from, to, x) => `M${from.x} ${from.y}C${x} ${from.y + 24} ${x} ${to.y} ${to.x} ${to.y}`;
  return {
    hasLabels: false,
    toPrefill: (to) => down({ x: gateway.x + 12, y: bottom }, to, 2),
    toDecode: (node) => down({ x: gateway.x + gateway.width - 40, y: bottom }, edge(node, 16), form.width),
    beside: (from, to) => around(from, to, 14),
    back: (node) => down({ x: gateway.x + gateway.width - 12, y: bottom }, edge(node, NODE.height - 12), form.width),
  };
}

export function curve(from, to) {
  const bend = Math.abs(to.x - from.x) * 0.5;
  const sign = to.x >= from.x ? 1 : -1;
  return `M${from.x} ${from.y}C${from.x + sign * bend} ${from.y} ${to.x - sign * bend} ${to.y} ${to.x} ${to.y}`;
}

// Labels of crossing paths are near the sender, those of straight paths beyond the crossings.
export function labelAt(start, end) {
  const share = Math.abs(end.y - start.y) < 1 ? 0.72 : 0.3;
  const bent = share * share * (3 - 2 * share);
  return [start.x + share * (end.x - start.x), start.y + bent * (end.y - start.y) - 5];
}

// Drawn above the prefill workers.
function over(from, to, plan) {
  const { top, prefill, node: width } = plan.form;
  const high = Math.max(top - 22, Math.min(...plan.nodes.map((node) => node.y)) - 16);
  return `M${from.x} ${from.y}C${from.x + 70} ${from.y} ${from.x + 60} ${high} ${prefill + width / 2} ${high}S${to.x - 70} ${to.y} ${to.x} ${to.y}`;
}

function around(from, to, out) {
  return `M${from.x} ${from.y}C${from.x + out} ${from.y} ${to.x + out} ${to.y} ${to.x} ${to.y}`;
}

// Tokens return below the prefill workers.
function back(from, to, plan) {
  const low = Math.min(plan.height - 8, Math.max(from.y, to.y) + 60);
  return `M${from.x} ${from.y}C${from.x - 90} ${from.y} ${from.x - 120} ${low} ${(from.x + to.x) / 2} ${low}S${to.x + 70} ${to.y} ${to.x} ${to.y}`;
}
