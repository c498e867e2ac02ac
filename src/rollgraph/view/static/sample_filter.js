// The form above the list of samples. What it holds is in the address.

import { debounce, fill, h, select } from "./dom.js";

export const FILTERS = ["q", "kind", "step", "finish", "min", "max"];

const KINDS = Object.entries({
  "": "All kinds",
  train: "Trained on",
  validation: "Validation",
  dropped: "Filtered out",
});
const ENDINGS = Object.entries({
  "": "Any ending",
  stop: "Finished",
  length: "Truncated",
  error: "Failed",
  abort: "Aborted",
});

export class SampleFilter {
  /** `apply(values)` is called some time after the last change. */
  constructor(params, apply) {
    const later = debounce(200, () => apply(this.values()));
    const typed = (label, attributes) => h("input", { "aria-label": label, ...attributes, on: { input: later } });
    this.controls = {
      q: typed("Search prompts and completions", { type: "search", placeholder: "Search prompts and completions" }),
      kind: select("Kind", KINDS, "", later),
      finish: select("Ending", ENDINGS, "", later),
      step: typed("Step", { type: "number", placeholder: "any", list: "steps" }),
      min: typed("Lowest reward", { type: "number", step: "any", placeholder: "min" }),
      max: typed("Highest reward", { type: "number", step: "any", placeholder: "max" }),
    };
    this.steps = h("datalist", { id: "steps" });
    const { q, kind, finish, step, min, max } = this.controls;
    this.element = h(
      "form",
      { class: "toolbar", role: "search", on: { submit: (event) => event.preventDefault() } },
      q,
      kind,
      finish,
      h("label", { class: "field" }, "Step ", step, this.steps),
      h("span", { class: "field" }, "Reward ", min, " – ", max),
    );
    this.show(params);
  }

  values() {
    return Object.fromEntries(FILTERS.map((name) => [name, this.controls[name].value]));
  }

  get isActive() {
    return Object.values(this.values()).some(Boolean);
  }

  /** The parameters of a request. */
  query() {
    const { min, max, ...rest } = this.values();
    return { ...rest, reward_min: min, reward_max: max };
  }

  /** Steps that have samples, to choose from. */
  offerSteps(steps) {
    if (steps.length === this.steps.children.length) return;
    const options = steps.map((step) => h("option", { value: step }));
    fill(this.steps, options);
  }

  /** Follows the address, and leaves alone what somebody is typing. */
  show(params) {
    for (const [name, control] of Object.entries(this.controls)) {
      if (control !== document.activeElement) control.value = params[name] ?? "";
    }
  }
}
