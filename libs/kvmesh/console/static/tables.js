// Figures, bars and tables.

import { html, show, svg } from "./dom.js";
import * as format from "./format.js";
import { MAX_ROWS, heaviest, notable } from "./order.js";

export function drawFigures(element, snapshot) {
  const s = snapshot.sample;
  const figures = [
    [format.count(snapshot.open), "", "open requests"],
    [format.rate(s?.requests_s ?? 0), "/s", "requests"],
    [format.count(s?.decode_tokens_s), "/s", "tokens generated"],
    [format.count(s?.prefill_tokens_s), "/s", "prompt tokens"],
    [...unit(format.milliseconds(scaled(s?.ttft_p50_s))), "first token, p50"],
    [...unit(format.milliseconds(scaled(s?.ttft_p99_s))), "first token, p99"],
    [...unit(format.percent(s?.disaggregated_share)), "disaggregated"],
    [`${s?.prefill_workers ?? 0} : ${s?.decode_workers ?? 0}`, "", "prefill : decode"],
  ];
  show(element, figures.map(([value, suffix, label]) =>
    html("div", { class: "figure" }, html("b", {}, value, suffix ? html("small", {}, suffix) : null), html("span", {}, label)),
  ));
}

function scaled(seconds) {
  return seconds === null || seconds === undefined ? null : seconds * 1000;
}

function unit(text) {
  const [value, suffix] = text.split(" ");
  return [value, suffix ?? ""];
}

export function drawBars(element, rows, kind, empty) {
  if (rows.length === 0) {
    show(element, html("p", { class: "empty" }, empty));
    return;
  }
  const largest = Math.max(...rows.map(([, value]) => value), 1);
  show(element, html("div", { class: "bars" }, rows.flatMap(([name, value]) => [
    html("span", {}, name),
    svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": true },
      svg("rect", { class: "bar", width: 100, height: 8, rx: 2 }),
      svg("rect", { class: `value ${kind}`, width: (100 * value) / largest, height: 8, rx: 2 })),
    html("b", {}, format.count(value)),
  ])));
}

function table(element, columns, rows, total, describe) {
  show(element,
    html("thead", {}, html("tr", {}, columns.map(([title, number]) => html("th", { class: number ? "number" : null, scope: "col" }, title)))),
    html("tbody", {}, rows.length ? rows.map(describe) : note(columns, "nothing yet"), total > rows.length ? note(columns, `and ${total - rows.length} more`) : null));
}

const note = (columns, content) => html("tr", {}, html("td", { class: "empty", colspan: columns.length }, content));
const text = (content, attributes = {}) => html("td", attributes, content);
const number = (content) => html("td", { class: "number" }, content);
const word = (content) => text(html("span", { class: "word", "data-word": content }, content));
const role = (id, its) => text(html("span", { class: "role", "data-role": its }, id));

export function drawGroups(element, groups) {
  const columns = [["group"], ["model"], ["checkpoint"], ["prefill : decode"], ["ready", 1], ["open", 1], ["prefill slots", 1], ["decode slots", 1], ["KV used", 1], ["first token p50", 1], ["p99", 1], ["prompt tok/s", 1], ["tok/s", 1]];
  const rows = groups.slice(0, MAX_ROWS);
  table(element, columns, rows, groups.length, (g) => html("tr", {},
    text(g.name),
    text(g.model),
    text(g.checkpoint, { class: "quiet" }),
    text(`${g.workers.prefill + g.workers.hybrid} : ${g.workers.decode + g.workers.hybrid}`),
    number(`${g.ready} / ${total(g.workers)}`),
    number(format.count(g.open)),
    number(`${g.prefill.active} / ${g.prefill.slots}`),
    number(`${g.decode.active} / ${g.decode.slots}`),
    number(format.percent(g.blocks.total ? g.blocks.used / g.blocks.total : 0)),
    number(format.milliseconds(g.ttft_p50_ms)),
    number(format.milliseconds(g.ttft_p99_ms)),
    number(format.count(g.prefill_tokens_s)),
    number(format.count(g.decode_tokens_s))));
}

const total = (counts) => Object.values(counts).reduce((sum, each) => sum + each, 0);

export function drawWorkers(element, workers, gone) {
  const columns = [["worker"], ["role"], ["cluster"], ["group"], ["state"], ["KV blocks"], ["used", 1], ["cached", 1], ["heat", 1], ["prefill", 1], ["decode", 1], ["prompt tok/s", 1], ["tok/s", 1]];
  const rows = [...notable(workers), ...gone];
  table(element, columns, rows, workers.length + gone.length, (w) => (w.blocks ? workerRow(w) : goneRow(w, columns.length)));
}

function goneRow(w, width) {
  return html("tr", { class: "gone" },
    role(w.id, w.role),
    text(w.role),
    text(w.cluster),
    text(""),
    html("td", { colspan: width - 4 }, html("span", { class: "word", "data-word": "gone" }, `left ${format.duration(w.for_s)} ago`)));
}

function workerRow(w) {
  return html("tr", {},
    role(w.id, w.role),
    text(w.role),
    text(w.cluster),
    text(w.group, { class: "quiet" }),
    word(w.state),
    text([meter(w.blocks), `${format.count(w.blocks.total)} × ${format.bytes(w.blocks.bytes)}`].flat().reduce((cell, part) => (cell.append(part), cell), html("span"))),
    number(format.percent(w.blocks.used / w.blocks.total)),
    number(format.percent(w.blocks.cached / w.blocks.total)),
    heat(w.hit_share),
    number(`${w.prefill.active} / ${w.prefill.slots}`),
    number(`${w.decode.running + w.decode.reserved} / ${w.decode.slots}`),
    number(format.count(w.prefill_tokens_s)),
    number(format.count(w.decode_tokens_s)));
}

function meter(blocks) {
  const used = (100 * blocks.used) / blocks.total;
  const cached = (100 * blocks.cached) / blocks.total;
  return html("span", { class: "meter" }, svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": true },
    svg("rect", { class: "used", width: used, height: 8 }),
    svg("rect", { class: "cached", x: used, width: cached, height: 8 })));
}

// Fraction of prompt tokens found cached in the last second: a deeper colour means more hits.
function heat(share) {
  const cell = html("td", { class: "number" });
  const chip = html("span", { class: "heat" }, format.percent(share));
  if (share !== null) chip.style.background = `color-mix(in srgb, var(--decode) ${Math.round(share * 45)}%, transparent)`;
  cell.append(chip);
  return cell;
}

export function drawLinks(element, links) {
  const columns = [["from"], ["to"], ["channel"], ["now", 1], ["total", 1], ["goodput when busy", 1], ["budget", 1], ["budget used", 1], ["queued", 1], ["round trip", 1], ["sent again", 1], ["failed", 1]];
  table(element, columns, heaviest(links), links.length, (link) => html("tr", {},
    text(link.from),
    text(link.to),
    text(link.channel),
    number(`${format.bytes(link.bytes_s)}/s`),
    number(format.bytes(link.bytes_total)),
    number(link.goodput_bytes_s ? `${format.bytes(link.goodput_bytes_s)}/s` : "–"),
    number(link.budget_bytes_s ? `${format.bytes(link.budget_bytes_s)}/s` : "none"),
    number(link.budget_bytes_s ? format.percent(link.bytes_s / link.budget_bytes_s) : "–"),
    number(format.bytes(link.queued_bytes)),
    number(format.milliseconds(link.rtt_ms)),
    number(format.count(link.retransmits)),
    number(format.count(link.failed_total))));
}

export function drawRequests(element, requests) {
  const columns = [["request"], ["at"], ["stage"], ["prompt", 1], ["cached", 1], ["output", 1], ["first token", 1], ["time", 1], ["placement"], ["prefill"], ["decode"], ["refused", 1], ["moved", 1]];
  table(element, columns, requests, requests.length, (r) => html("tr", { "data-id": r.id },
    html("td", { class: "id", title: r.id }, html("button", { class: "plain", type: "button" }, r.id)),
    text(format.clock(r.at)),
    word(r.stage === "ended" ? r.finish : r.stage),
    number(format.count(r.prompt_tokens)),
    number(format.count(r.cached_tokens)),
    number(format.count(r.output_tokens)),
    number(format.milliseconds(r.ttft_ms)),
    number(format.milliseconds(r.elapsed_ms)),
    text(r.placement === "auto" ? "" : r.placement),
    text(r.prefill),
    text(r.decode),
    number(r.refusals || ""),
    number(r.moves || "")));
}
