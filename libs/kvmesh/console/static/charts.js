// Small multiples of the last five minutes, drawn from the samples.

import { html, show, svg } from "./dom.js";
import * as format from "./format.js";

const WIDTH = 300;
const HEIGHT = 92;

const CHARTS = [
  {
    title: "Requests per second",
    format: format.rate,
    series: [["arrived", (s) => s.requests_s]],
  },
  {
    title: "Tokens per second",
    format: format.count,
    series: [["prefill", (s) => s.prefill_tokens_s], ["decode", (s) => s.decode_tokens_s]],
  },
  {
    title: "Time to first token",
    format: format.milliseconds,
    series: [["p50", (s) => scaled(s.ttft_p50_s, 1000)], ["p99", (s) => scaled(s.ttft_p99_s, 1000)]],
  },
  {
    title: "KV bytes per second",
    format: format.bytes,
    series: [["handed over", (s) => s.transfer_bytes_s]],
  },
  {
    title: "Disaggregated share",
    format: format.percent,
    top: 1,
    series: [["of placed requests", (s) => s.disaggregated_share]],
  },
  {
    title: "Refusals per second",
    format: format.rate,
    series: [["met, tried elsewhere", (s) => s.refusals_s]],
  },
  {
    title: "Workers by role",
    format: format.count,
    whole: true,
    series: [["prefill", (s) => s.prefill_workers], ["decode", (s) => s.decode_workers]],
  },
  {
    title: "Offload threshold, tokens",
    format: format.count,
    needed: true,
    series: [["uncached tokens", (s) => s.threshold_tokens]],
  },
];

function scaled(value, factor) {
  return value === null ? null : value * factor;
}

export function drawCharts(element, samples) {
  const drawn = CHARTS.filter((chart) => !chart.needed || samples.some((s) => chart.series[0][1](s) !== null));
  show(element, drawn.map((chart) => draw(chart, samples)));
}

function draw(chart, samples) {
  const lines = chart.series.map(([, read]) => samples.map(read));
  const largest = Math.max(0, ...lines.flat().filter((value) => value !== null));
  const top = chart.top ?? ceiling(largest, chart.whole);
  const latest = lines.map((line) => line.findLast((value) => value !== null) ?? null);
  return html(
    "article",
    { class: "chart" },
    html(
      "header",
      {},
      html("h2", {}, chart.title),
      html(
        "span",
        { class: "values" },
        chart.series.flatMap(([name], i) => [
          html("i", { "data-series": i + 1 }),
          `${name} `,
          html("b", {}, chart.format(latest[i])),
        ]),
      ),
    ),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${chart.title}: ${chart.series.map(([name], i) => `${name} ${chart.format(latest[i])}`).join(", ")}`,
      },
      [0.02, 0.5, 0.98].map((at) =>
        svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: at * HEIGHT, y2: at * HEIGHT }),
      ),
      lines.flatMap((line, i) => [
        i === 0 ? svg("path", { class: "area", "data-series": 1, d: area(line, top) }) : null,
        svg("path", { class: "line", "data-series": i + 1, d: path(line, top) }),
      ]),
    ),
    html("footer", {}, html("span", {}, ago(samples)), html("span", {}, `top ${chart.format(top)}`)),
  );
}

function ago(samples) {
  if (samples.length < 2) return "now";
  const seconds = Math.round(samples.at(-1).at_s - samples[0].at_s);
  return `${format.duration(seconds)} ago`;
}

// A round number that is not below the largest value.
function ceiling(largest, whole) {
  if (largest <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  const step = [1, 1.5, 2, 3, 5, 7.5, 10].find((factor) => factor * power >= largest) * power;
  return whole ? Math.max(2, Math.ceil(step)) : step;
}

function points(line, top) {
  const step = WIDTH / Math.max(line.length - 1, 1);
  return line.map((value, i) => (value === null ? null : [i * step, (0.98 - (0.96 * Math.min(value, top)) / top) * HEIGHT]));
}

function path(line, top) {
  let pen = "M";
  let d = "";
  for (const point of points(line, top)) {
    if (point === null) {
      pen = "M";
      continue;
    }
    d += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = "L";
  }
  return d;
}

function area(line, top) {
  const known = points(line, top).filter((point) => point !== null);
  if (known.length < 2) return "";
  const base = 0.98 * HEIGHT;
  const along = known.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return `M${known[0][0].toFixed(1)} ${base}${along}L${known.at(-1)[0].toFixed(1)} ${base}Z`;
}
