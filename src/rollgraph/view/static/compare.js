// Several runs beside each other: curves on one chart, what differs in their configurations, answers to one prompt.

import { Chart } from "./chart.js";
import { PALETTE, formatOf } from "./charts.js";
import { promptColumns } from "./compare_prompt.js";
import { source } from "./data.js";
import { empty, fill, h, refill, select } from "./dom.js";
import { formatValue } from "./format.js";
import { change } from "./route.js";
import { table } from "./table.js";

const FIRST = ["reward", "validation/reward", "policy/entropy", "length/mean", "validation/loss", "loss"];
const SHOWN = 4;

export class Compare {
  constructor({ runs, params, note }) {
    this.runs = runs;
    this.params = params;
    this.note = note;
    this.charts = [];
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Runs" });
    this.grid = h("div", { class: "chart-grid two" });
    this.adder = h("div", {});
    this.config = h("section", {});
    this.prompts = h("section", {});
    this.toolbar = h("div", { class: "toolbar" }, this.chips, h("span", { class: "spacer" }), this.adder);
    this.element = h("div", { class: "compare" });
    this.ready = this.load();
  }

  chosen() {
    const ids = this.params.runs ? this.params.runs.split(",") : this.runs.slice(0, PALETTE.length).map(({ id }) => id);
    return this.runs.filter(({ id }) => ids.includes(id));
  }

  colorOf(run) {
    return PALETTE[this.runs.indexOf(run) % PALETTE.length];
  }

  async load() {
    if (this.runs.length < 2) {
      const command = h("code", {}, "rollgraph view runs/a runs/b");
      fill(this.element, empty("There is one run", "Name several folders to compare them: ", command, "."));
      return;
    }
    if (!this.toolbar.isConnected) fill(this.element, this.toolbar, this.grid, this.config, this.prompts);
    this.showChips();
    await this.loadNames();
    this.makeCharts();
    await Promise.all([this.drawCharts(), this.showConfig()]);
    await this.showPrompts();
  }

  showChips() {
    const chosen = this.chosen();
    const chips = this.runs.map((run) => {
      const others = chosen.filter(({ id }) => id !== run.id);
      const pressed = others.length < chosen.length;
      const next = pressed ? others : [...chosen, run];
      const click = () => next.length && change({ runs: next.map(({ id }) => id).join(",") });
      const swatch = h("i", { class: "swatch", style: { background: `var(--${this.colorOf(run)})` } });
      return h(
        "button",
        { type: "button", class: "chip", "aria-pressed": String(pressed), title: run.path, on: { click } },
        swatch,
        run.name,
      );
    });
    refill(this.chips, chips);
  }

  async loadNames() {
    const answers = await Promise.all(this.chosen().map(({ id }) => source.names(id)));
    this.names = [...new Set(answers.flatMap(({ names }) => names.map(({ name }) => name)))].sort();
    const first = FIRST.filter((name) => this.names.includes(name)).slice(0, SHOWN);
    this.shown = this.params.metrics ? this.params.metrics.split("\n") : first;
    const rest = this.names.filter((name) => !this.shown.includes(name)).map((name) => [name, name]);
    const add = (name) => change({ metrics: [...this.shown, name].join("\n") });
    fill(
      this.adder,
      h("label", { class: "field" }, "Add a chart ", select("Add a chart", [["", "metric …"], ...rest], "", add)),
    );
  }

  makeCharts() {
    this.closeCharts();
    const lines = this.chosen().map((run) => ({ label: run.name, color: this.colorOf(run) }));
    const make = (title) => new Chart({ title, lines, group: "compare", format: formatOf(title), height: 190 });
    this.charts = this.shown.map(make);
    const figures = this.charts.map(({ element }) => element);
    fill(this.grid, figures);
  }

  async drawCharts() {
    const charts = this.charts;
    const names = this.shown;
    const runs = this.chosen();
    const answers = await Promise.all(runs.map(({ id }) => source.series(id, { names, x: "step", points: 600 })));
    if (charts !== this.charts) return; // other runs or metrics were chosen meanwhile
    names.forEach((name, index) => {
      const columns = answers.map(({ series }) => series[name]);
      charts[index].draw(columns, {});
    });
  }

  async showConfig() {
    const runs = this.chosen();
    const { config, prompts, notes } = await source.compare(runs.map(({ id }) => id));
    this.note(notes);
    this.shared = prompts;
    const rows = config.map(({ key, values }) => {
      const cells = runs.map(({ id }) => h("td", {}, h("code", {}, formatValue(values[id]))));
      return h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), cells);
    });
    const names = runs.map(({ name }) => name);
    const same = h("p", { class: "quiet" }, "These runs have the same configuration.");
    fill(
      this.config,
      h("h2", {}, "What differs in their configurations"),
      config.length ? table(["Key", ...names], rows) : same,
    );
  }

  async showPrompts() {
    const choose = (prompt) => change({ prompt });
    const colorOf = (run) => this.colorOf(run);
    const content = await promptColumns(this.chosen(), this.shared, this.params.prompt, choose, colorOf);
    refill(this.prompts, h("h2", {}, "One prompt, side by side"), content);
  }

  update(params) {
    const before = this.params;
    this.params = params;
    if (before.runs === params.runs && before.metrics === params.metrics) return this.showPrompts();
    return this.load();
  }

  /** Draws new steps; a run that has come or gone changes everything. */
  grown(runs) {
    const same = runs.length === this.runs.length && runs.every(({ id }, index) => id === this.runs[index].id);
    this.runs = runs;
    if (!same) return this.load();
    return runs.length > 1 ? Promise.all([this.drawCharts(), this.showConfig()]) : null;
  }

  closeCharts() {
    for (const chart of this.charts) chart.close();
  }

  close() {
    this.closeCharts();
  }
}
