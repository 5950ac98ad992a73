// Chooses and sorts the rows to show if there are too many.

// Maximum rows of one table: more are slow to draw once per second, and nobody reads them.
export const MAX_ROWS = 200;

const activity = (w) => w.prefill_tokens_s + w.decode_tokens_s + w.blocks.used / w.blocks.total;

// Sorts workers, busiest first; equal ones keep their order.
export function byActivity(workers) {
  return [...workers].sort((a, b) => activity(b) - activity(a));
}

// Workers for a table, by name: all of them, or the busiest and those that are not ready.
export function notable(workers) {
  if (workers.length <= MAX_ROWS) return workers;
  const ready = workers.filter((w) => w.state === "ready");
  const first = [...workers.filter((w) => w.state !== "ready"), ...byActivity(ready)].slice(0, MAX_ROWS);
  const chosen = new Set(first);
  return workers.filter((w) => chosen.has(w));
}

// Sorts links by the bytes they carried, most first.
export function heaviest(links) {
  return [...links].sort((a, b) => b.bytes_total - a.bytes_total).slice(0, MAX_ROWS);
}
