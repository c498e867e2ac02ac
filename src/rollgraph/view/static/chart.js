// Lines over steps or time, each with the range that its points stand for and, smoothed, with what was measured.

import uPlot from "./uplot.js";
import { formatNumber, formatTick } from "./format.js";
import { PlotFigure, legendKey } from "./plot_figure.js";
import { positive, smooth } from "./smoothing.js";
import { color } from "./theme.js";

const PER_LINE = 4; // columns of data that uPlot gets for each line: lowest, highest, measured, smoothed
const SMOOTHED = 4; // the place of the last of them
const FEWEST = 20; // points of a line that is smoothed: of fewer, the mean would lag behind all of them

export class Chart extends PlotFigure {
  /** `lines` are [{label, color}], a color being the name of a custom property. */
  constructor({ lines, format = formatNumber, height = 168, ...rest }) {
    super({ height, ...rest });
    this.lines = lines;
    this.format = format;
  }

  /** Draws `columns`, one {x, y, low, high} or undefined for each line. */
  draw(columns, { smoothing = 0, log = false, range = null, axis = "step" }) {
    const restyled = log !== this.log || axis !== this.axis;
    Object.assign(this, { log, range, axis });
    this.data = join(columns, (values) => (log ? positive(values) : values), smoothing);
    if (!this.plot || restyled) this.build();
    else this.plot.setData(this.data);
    this.read(this.cursor());
    this.describe(columns);
  }

  build() {
    const bands = this.lines.map((line, index) => ({
      series: [PER_LINE * index + 2, PER_LINE * index + 1],
      fill: `${color(line.color)}22`,
    }));
    this.mount({
      scaleY: this.log ? { distr: 3 } : { range: padded },
      formatY: this.format === formatNumber ? formatTick : this.format,
      series: this.lines.flatMap((line) => lineSeries(color(line.color))),
      bands,
      points: { size: 6 },
    });
  }

  /** Shows the values at a place, or the last ones. */
  read(index) {
    const inside = index !== null && index !== undefined;
    this.position.textContent = inside ? this.place(index) : "";
    const keys = this.lines.map((line, at) => {
      const column = this.data[PER_LINE * at + SMOOTHED];
      const value = this.format(lastKnown(column, inside ? index : column.length - 1));
      return legendKey(line.label, value, this.lines.length > 1 && line.color);
    });
    this.legend.replaceChildren(...keys);
  }

  describe(columns) {
    const parts = this.lines.map(({ label }, index) => {
      const known = (columns[index]?.y ?? []).filter((value) => value !== null);
      if (!known.length) return `${label} has no values`;
      return `${label} from ${this.format(known[0])} to ${this.format(known.at(-1))}`;
    });
    this.host.setAttribute("aria-label", `${this.title}: ${parts.join("; ")}. Arrow keys read values.`);
  }
}

function lineSeries(stroke) {
  const edge = { stroke: "transparent", points: { show: false }, spanGaps: true };
  const isShort = (plot, index) => plot.data[index].filter((value) => (value ?? null) !== null).length < 3;
  return [
    edge,
    edge,
    { stroke: `${stroke}55`, width: 1, spanGaps: true, points: { show: false } },
    { stroke, width: 1.75, spanGaps: true, points: { show: isShort, size: 5, fill: stroke } },
  ];
}

/** Brings lines with their own x onto one x. */
function join(columns, prepare, smoothing) {
  const tables = columns.map((column) => {
    const { x = [], y = [], low, high } = column ?? {};
    const weight = y.length < FEWEST ? 0 : smoothing;
    const measured = weight ? y : y.map(() => null);
    return [x, prepare(low ?? y), prepare(high ?? y), prepare(measured), prepare(smooth(y, weight))];
  });
  return uPlot.join(tables);
}

function lastKnown(column, index) {
  for (let at = index; at >= 0; at -= 1) {
    if ((column[at] ?? null) !== null) return column[at];
  }
  return null;
}

/** Room above and below the lines; a constant gets an axis around it. */
function padded(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(low) * 0.1 || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
