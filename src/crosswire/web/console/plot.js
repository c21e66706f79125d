// Small plots as SVG: sparklines, and time series with an axis and values under the pointer.

import { el, put, svg } from "./dom.js";
import { timeText } from "./format.js";

const WIDTH = 600;
const HEIGHT = 120;

/** Points as the paths of a line, with gaps where nothing was measured. */
function linePath(values, most, width, height) {
  const step = values.length > 1 ? width / (values.length - 1) : width;
  let path = "";
  let isDrawing = false;
  values.forEach((value, index) => {
    if (value === null || value === undefined) { isDrawing = false; return; }
    const x = (index * step).toFixed(1);
    const y = (height - (value / most) * height).toFixed(1);
    path += `${isDrawing ? "L" : "M"}${x} ${y}`;
    // A single point between gaps would have no length.
    if (!isDrawing) path += "h0.1";
    isDrawing = true;
  });
  return path;
}

function largest(lists) {
  let most = 0;
  for (const list of lists) for (const value of list) if (value > most) most = value;
  return most;
}

// The next 1, 2 or 5 of a power of ten: an axis that does not jump with each point.
function axisMost(most, isBinary) {
  if (most <= 0) return 1;
  const base = isBinary ? 1024 ** Math.max(Math.floor(Math.log(most) / Math.log(1024)), 0) : 1;
  const scaled = most / base;
  const power = 10 ** Math.floor(Math.log10(scaled));
  // Less, not equal: a line at the top would cross the number that is there.
  for (const factor of [1, 2, 5, 10, 20]) if (scaled < factor * power) return factor * power * base;
  return most;
}

/** A line without an axis, for a table. */
export function sparkline(values, label) {
  const most = largest([values]) || 1;
  return svg("svg", { class: "sparkline", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: linePath(values, most, 100, 22), transform: "translate(0 1)" }));
}

/**
 * A time series. `title`; `lines`: {label, values, kind}; `kind` is a class that has its colour
 * (`a`, `b`, `c`, `bad`); `first` and `step_s` as the API has them; `format` of a value.
 * `update({first, step_s, lines})` shows new points.
 */
export function timeSeries({ title, format, binary = false }) {
  const top = el("span", { class: "plot-top" });
  const nothing = el("span", { class: "plot-nothing" }, "nothing measured yet");
  const left = el("span", {});
  const right = el("span", {});
  const legend = el("ul", { class: "legend" });
  const paths = svg("g", {});
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: -9, x2: -9 });
  const picture = svg("svg", { class: "series", viewBox: `0 -2 ${WIDTH} ${HEIGHT + 4}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
    svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
    svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: 0, y2: 0 }), paths, cursor);
  const root = el("figure", { class: "plot" },
    el("figcaption", {}, el("span", { class: "plot-title" }, title), legend),
    el("div", { class: "plot-area" }, top, nothing, picture),
    el("div", { class: "plot-times" }, left, right));
  let shown = { first: "", step_s: 1, lines: [] };
  let chosen = null;

  function showLegend() {
    const at = chosen;
    put(legend, shown.lines.map((line) => {
      const known = line.values.filter((each) => each !== null);
      const value = at === null ? known.at(-1) : line.values[at];
      return el("li", { class: `key ${line.kind}` }, `${line.label} `, el("b", {}, value === undefined || value === null ? "–" : format(value)));
    }), at === null ? null : el("li", { class: "at" }, timeText(timeOf(at))));
  }

  function timeOf(index) {
    return new Date(new Date(shown.first).getTime() + index * shown.step_s * 1000).toISOString();
  }

  picture.addEventListener("pointermove", (event) => {
    const points = shown.lines[0]?.values.length ?? 0;
    if (points < 2) return;
    const box = picture.getBoundingClientRect();
    chosen = Math.min(Math.max(Math.round(((event.clientX - box.left) / box.width) * (points - 1)), 0), points - 1);
    const x = (chosen / (points - 1)) * WIDTH;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    showLegend();
  });
  picture.addEventListener("pointerleave", () => {
    chosen = null;
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    showLegend();
  });

  root.update = (points) => {
    shown = points;
    const most = axisMost(largest(points.lines.map((line) => line.values)), binary);
    put(paths, points.lines.map((line) => svg("path", { class: `line ${line.kind}`, d: linePath(line.values, most, WIDTH, HEIGHT) })));
    put(top, format(most));
    nothing.hidden = points.lines.some((line) => line.values.some((each) => each !== null));
    const length = points.lines[0]?.values.length ?? 0;
    put(left, length ? timeText(timeOf(0)) : "");
    put(right, length ? timeText(timeOf(length - 1)) : "");
    const summary = points.lines.map((line) => {
      const last = line.values.filter((each) => each !== null).at(-1);
      return `${line.label} ${last === undefined ? "not measured" : format(last)}`;
    });
    picture.setAttribute("aria-label", `${title}: ${summary.join(", ")}; axis up to ${format(most)}`);
    showLegend();
  };
  return root;
}
