// What a good engineer would notice about a run: sentences, each with its evidence.

import { Chart } from "./chart.js";
import { PALETTE } from "./charts.js";
import { source } from "./data.js";
import { empty, fill, h } from "./dom.js";
import { plural } from "./format.js";
import { linkTo } from "./route.js";

const LABELS = { problem: "Problem", warning: "Warning", note: "Note", good: "Good" };
const SEVERITIES = Object.keys(LABELS);

export class Diagnosis {
  constructor({ run, note }) {
    this.run = run.id;
    this.note = note;
    this.pictures = []; // {chart, evidence}
    this.element = h("div", { class: "diagnosis" });
    this.ready = this.load();
  }

  async load() {
    const { findings, notes } = await source.diagnosis(this.run);
    this.note(notes);
    const written = JSON.stringify(findings);
    if (written !== this.written) this.show(findings);
    this.written = written;
    await Promise.all(this.pictures.map((picture) => this.draw(picture)));
  }

  show(findings) {
    this.close();
    const good = findings.filter(({ severity }) => severity === "good");
    const rest = findings.filter(({ severity }) => severity !== "good");
    rest.sort((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity));
    const heading = rest.length ? `${plural(rest.length, "thing")} to look at` : "Nothing to worry about";
    const nothing = empty("Nothing to say yet", "A few steps are needed for a diagnosis.");
    const cards = rest.map((finding) => this.card(finding));
    fill(this.element, findings.length ? h("h2", {}, heading) : nothing, cards, good.length > 0 && goodList(good));
  }

  card({ severity, sentence, advice, evidence = [] }) {
    const texts = [h("p", {}, sentence), advice && h("p", {}, advice)];
    const statement = h("div", { class: "statement" }, texts, this.links(evidence));
    const series = evidence.find(({ kind }) => kind === "series");
    const label = h("div", { class: "severity" }, LABELS[severity]);
    return h("article", { class: "finding", data: { severity } }, label, statement, series && this.picture(series));
  }

  links(evidence) {
    const links = evidence.map((item) => (item.kind === "series" ? this.chartLink(item) : this.samplesLink(item)));
    return h("span", { class: "evidence" }, links);
  }

  chartLink({ label, names }) {
    const address = linkTo("overview", { run: this.run, show: names[0] });
    return h("a", { href: address }, label ?? names.join(", "));
  }

  /** Evidence has the parameters of a request for samples; a single group is opened. */
  samplesLink({ kind, label, reward_min: min, reward_max: max, group, split, ...filter }) {
    const single = given(group) && given(filter.step);
    const open = single ? `${filter.step}.${split ?? "train"}.${group}` : "";
    const address = linkTo("samples", { run: this.run, ...filter, kind: split, min, max, open });
    return h("a", { href: address }, label ?? (given(filter.step) ? `samples of step ${filter.step}` : "samples"));
  }

  picture(evidence) {
    const lines = evidence.names.map((name, index) => ({ label: name, color: PALETTE[index % PALETTE.length] }));
    const chart = new Chart({ title: "", lines, height: 110 });
    this.pictures.push({ chart, evidence });
    return chart.element;
  }

  async draw({ chart, evidence: { names, from, to } }) {
    const { series } = await source.series(this.run, { names, x: "step", from, to, points: 300 });
    const columns = names.map((name) => series[name]);
    chart.draw(columns, {});
  }

  update() {}

  grown() {
    return this.load();
  }

  close() {
    for (const { chart } of this.pictures) chart.close();
    this.pictures = [];
  }
}

function goodList(findings) {
  const items = findings.map(({ sentence }) => h("li", {}, sentence));
  return h("section", { class: "fine" }, h("h3", {}, "Looks good"), h("ul", {}, items));
}

function given(value) {
  return value !== undefined && value !== null;
}
