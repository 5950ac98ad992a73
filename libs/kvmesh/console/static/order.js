// What comes first where not everything is shown.

// Rows of one table: more are slow to draw once per second, and nobody reads them.
export const MAX_ROWS = 200;

const activity = (w) => w.prefill_tokens_s + w.decode_tokens_s + w.blocks.used / w.blocks.total;

// Workers, the busiest first; equal ones stay in order.
export function byActivity(workers) {
  return [...workers].sort((a, b) => activity(b) - activity(a));
}

// Workers for a table: all, or those that are not ready and the busiest, by name.
export function notable(workers) {
  if (workers.length <= MAX_ROWS) return workers;
  const ready = workers.filter((w) => w.state === "ready");
  const first = [...workers.filter((w) => w.state !== "ready"), ...byActivity(ready)].slice(0, MAX_ROWS);
  const chosen = new Set(first);
  return workers.filter((w) => chosen.has(w));
}

// Links, those that carried most first.
export function heaviest(links) {
  return [...links].sort((a, b) => b.bytes_total - a.bytes_total).slice(0, MAX_ROWS);
}
