// Where the time of a step goes: seconds by phase, stacked.

import { formatDuration, formatNumber } from "./format.js";
import { mean } from "./group_list.js";
import { PlotFigure, legendKey } from "./plot_figure.js";
import { stack } from "./smoothing.js";
import { color } from "./theme.js";

// In the order of a step, from the bottom up.
const COLORS = {
  generate: "series-1",
  reward: "series-2",
  score: "series-3",
  train: "series-4",
  validate: "series-6",
  save: "series-5",
  log: "series-8",
  switching: "series-7",
};
const ORDER = Object.keys(COLORS);

export class PhaseBand extends PlotFigure {
  constructor({ group, zoom }) {
    super({ title: "Time by phase", height: 150, wide: true, group, zoom });
  }

  draw({ x, phases }, { axis, range }) {
    const known = Object.keys(phases).filter((phase) => phases[phase].some((seconds) => seconds > 0));
    this.names = known.sort((a, b) => rank(a) - rank(b));
    this.element.hidden = !this.names.length;
    if (this.element.hidden) return;
    this.layers = this.names.map((phase) => phases[phase]);
    // uPlot paints in order, so the highest edge comes first and lower layers cover it.
    this.data = [x, ...stack(this.layers).reverse()];
    Object.assign(this, { axis, range });
    this.build();
    this.read(null);
    const means = this.names.map((name, index) => `${name} ${formatDuration(mean(this.layers[index]))}`);
    this.host.setAttribute("aria-label", `Time by phase, on average: ${means.join(", ")}. Arrow keys read values.`);
  }

  build() {
    const fills = this.names.map((name) => color(phaseColor(name))).reverse();
    this.mount({
      scaleY: { range: (_, __, top) => [0, top || 1] },
      formatY: (seconds) => `${formatNumber(seconds)} s`,
      series: fills.map((fill) => ({ stroke: fill, fill, width: 1, points: { show: false } })),
      points: { show: false },
    });
  }

  /** The seconds at a place, or their means. */
  read(index) {
    const inside = index !== null && index !== undefined;
    this.position.textContent = inside ? this.place(index) : "on average";
    const keys = this.names.map((name, layer) => {
      const seconds = inside ? this.layers[layer][index] : mean(this.layers[layer]);
      return legendKey(name, formatDuration(seconds), phaseColor(name));
    });
    this.legend.replaceChildren(...keys);
  }
}

function rank(phase) {
  return ORDER.includes(phase) ? ORDER.indexOf(phase) : ORDER.length;
}

/** The custom property with the colour of a phase. */
export function phaseColor(phase) {
  return COLORS[phase] ?? "series-7";
}
