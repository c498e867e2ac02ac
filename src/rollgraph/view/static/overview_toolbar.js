// The controls above the charts: axes, smoothing, and the part of the run that is shown. Their state is in the address.

import { debounce, h, refill, segmented } from "./dom.js";
import { change } from "./route.js";

const HORIZONTAL = Object.entries({ step: "Step", time: "Time" });
const VERTICAL = Object.entries({ "": "Linear", log: "Log" });

/** The settings that an address holds. */
export function readSettings({ x = "step", smooth = "0", y, from, to }) {
  const range = given(from) && given(to) ? [Number(from), Number(to)] : null;
  return { axis: x, smoothing: Number(smooth), log: y === "log", range };
}

/** Shows a part of the run, or all of it for null. */
export function zoom(from, to) {
  const [first, last] = [from, to].map((value) => (value === null ? "" : String(Number(value.toFixed(2)))));
  change({ from: first, to: last });
}

export class OverviewToolbar {
  /** `ends()` promises the first and the last x of the run, or null, for a range of which one end is typed. */
  constructor(settings, ends) {
    this.ends = ends;
    this.element = h("div", { class: "toolbar" });
    this.apply = debounce(60, (value) => change({ smooth: Number(value) ? value : "" }, { replace: true }));
    this.show(settings);
  }

  show({ axis, smoothing, log, range }) {
    refill(
      this.element,
      segmented("Horizontal axis", HORIZONTAL, axis, (x) => change({ x, from: "", to: "" })),
      segmented("Vertical axis", VERTICAL, log ? "log" : "", (scale) => change({ y: scale })),
      this.smoothingField(smoothing),
      h("span", { class: "spacer" }),
      h(
        "div",
        { class: "range" },
        rangeField("From", range?.[0], (value) => this.setRange(value, range?.[1])),
        rangeField("to", range?.[1], (value) => this.setRange(range?.[0], value)),
        h("button", { type: "button", disabled: !range, on: { click: () => zoom(null, null) } }, "Whole run"),
      ),
    );
  }

  smoothingField(smoothing) {
    const shown = h("output", { for: "smoothing" }, smoothing.toFixed(2));
    const input = (event) => {
      shown.textContent = Number(event.target.value).toFixed(2);
      this.apply(event.target.value);
    };
    const limits = { min: "0", max: "0.99", step: "0.01", value: smoothing };
    const slider = h("input", { type: "range", id: "smoothing", ...limits, on: { input } });
    return h("label", { class: "field" }, "Smoothing ", slider, shown);
  }

  async setRange(from, to) {
    const ends = await this.ends();
    if (!ends) return;
    const range = [from ?? ends[0], to ?? ends[1]];
    zoom(Math.min(...range), Math.max(...range));
  }
}

function rangeField(label, value, apply) {
  const read = (event) => event.target.value !== "" && apply(Number(event.target.value));
  const input = h("input", { type: "number", step: "any", value: value ?? "", on: { change: read } });
  return h("label", { class: "field" }, label, " ", input);
}

function given(value) {
  return value !== undefined && value !== "";
}
