// What all charts share: a figure with its values, drawn by uPlot, with a common cursor and zoom by drag.

import uPlot from "./uplot.js";
import { h } from "./dom.js";
import { formatClock, formatCount } from "./format.js";
import { color } from "./theme.js";

const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const HALF_DIGIT = 3.5; // pixels
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const CLOCK = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, ...WHOLE.map((hours) => hours * 3600)];
const MOVES = { ArrowLeft: -1, ArrowRight: 1 };

/** A chart has `build()`, which calls `mount`, and `read(index)`, which shows values: at a place, or all for null. */
export class PlotFigure {
  /**
   * `zoom(from, to)` is called after a drag, and `zoom(null, null)` after a double click. Charts with one `group` share
   * the position of the cursor.
   */
  constructor({ title, description, height, group, zoom, wide = false }) {
    Object.assign(this, { title, height, group, zoom, plot: null, data: [[]], axis: "step", range: null });
    this.position = h("span", { class: "position" });
    this.legend = h("div", { class: "legend" });
    const keydown = (event) => this.step(event);
    const label = title || "Chart"; // until there is something to describe
    this.host = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": label, on: { keydown } });
    const caption = h("figcaption", {}, h("h3", { title: description }, title), this.position, this.legend);
    this.element = h("figure", { class: wide ? "chart wide" : "chart" }, caption, this.host);
    this.resized = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.resized.observe(this.host);
    this.rebuild = () => this.plot && this.build();
    addEventListener("themechange", this.rebuild);
  }

  size() {
    return { width: Math.max(this.host.clientWidth, 80), height: this.height };
  }

  /** Draws `data` anew. `formatY` writes the numbers of the vertical axis. */
  mount({ scaleY, formatY, series, bands, points }) {
    this.plot?.destroy();
    this.element.dataset.axis = this.axis;
    const [formatX, steps] = this.axis === "time" ? [formatClock, CLOCK] : [formatCount, WHOLE];
    const right = () => Math.max(8, HALF_DIGIT * formatX(this.shownRange()[1]).length); // for half of the last number
    const options = {
      ...this.size(),
      padding: [8, right, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, range: () => this.shownRange() }, y: scaleY },
      axes: axes([formatX, steps], formatY),
      series: [{}, ...series],
      bands,
      cursor: {
        y: false,
        sync: this.group ? { key: this.group, scales: ["x", null] } : undefined,
        drag: { x: true, y: false, setScale: false },
        points,
      },
      hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)], setSelect: [(plot) => this.selected(plot)] },
    };
    this.plot = new uPlot(options, this.data, this.host);
    this.plot.over.addEventListener("dblclick", () => this.zoom?.(null, null));
  }

  shownRange() {
    const x = this.data[0];
    const [low, high] = this.range ?? [x[0] ?? 0, x.at(-1) ?? 1];
    return [low, high > low ? high : low + 1];
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    // Charts with a common cursor are selected together; the one under the pointer speaks for them.
    if (plot.over.matches(":hover")) this.zoom?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  /** Arrow keys move the cursor from point to point. */
  step(event) {
    if (!(event.key in MOVES) || !this.plot) return;
    event.preventDefault();
    const x = this.data[0];
    const now = this.plot.cursor.idx ?? x.length - 1;
    const next = Math.min(Math.max(now + MOVES[event.key], 0), x.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(x[next], "x"), top: 10 });
  }

  /** Where the cursor is; null if it is outside. */
  cursor() {
    return this.plot?.cursor.left >= 0 ? this.plot.cursor.idx : null;
  }

  /** A place on the axis in words. */
  place(index) {
    const x = this.data[0][index];
    return this.axis === "time" ? formatClock(x) : `step ${formatCount(x)}`;
  }

  close() {
    this.resized.disconnect();
    removeEventListener("themechange", this.rebuild);
    this.plot?.destroy();
    this.plot = null;
  }
}

export function legendKey(label, value, swatch) {
  const mark = swatch && h("i", { class: "swatch", style: { background: `var(--${swatch})` } });
  return h("span", { class: "key" }, mark, label, " ", h("b", { class: "value" }, value));
}

/** There is nothing between two steps or seconds, so there is no number for it below a chart either. */
function axes([formatX, incrs], formatY) {
  const common = { font: FONT, stroke: color("muted"), ticks: { show: false }, gap: 6 };
  const filter = (plot, splits) => (plot.scales.y.distr === 3 ? splits.map(readable) : splits);
  return [
    { ...common, grid: { show: false }, incrs, values: (_, splits) => splits.map(formatX), size: 24, space: 64 },
    {
      ...common,
      grid: { stroke: color("line"), width: 1, filter },
      values: (_, splits) => splits.map((value) => (value === null ? "" : formatY(value))),
      size: (_, texts) => Math.max(50, ...(texts ?? []).map((text) => 14 + 6.2 * text.length)),
      space: 34,
    },
  ];
}

/** Of the many lines of a logarithmic grid, those at 1, 2 and 5 times a power of ten. */
function readable(value) {
  const mantissa = Number((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toFixed(3));
  return [1, 2, 5].includes(mantissa) ? value : null;
}
