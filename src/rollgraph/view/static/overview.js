// The curves of a run: the charts that matter, time by phase, and every other metric on demand.

import { Chart } from "./chart.js";
import { CHARTS, PALETTE, formatOf } from "./charts.js";
import { source } from "./data.js";
import { empty, fill, h } from "./dom.js";
import { OverviewToolbar, readSettings, zoom } from "./overview_toolbar.js";
import { PhaseBand } from "./phase_band.js";

const POINTS = 800;
const EMPTY = [
  "No step is finished yet",
  "Curves appear here with the first row of metrics.jsonl. Loading, captures and a warm start come before it: the " +
    "terminal of the run says how far they are.",
];

export class Overview {
  constructor({ run, params, note }) {
    this.run = run.id;
    this.params = params;
    this.note = note;
    this.cards = []; // {chart, names}
    this.sections = []; // {topic, names, section}
    this.grid = h("div", { class: "chart-grid" });
    this.topics = h("div", { class: "topics" });
    this.toolbar = new OverviewToolbar(readSettings(params), () => this.ends());
    this.band = new PhaseBand({ group: "overview", zoom });
    this.element = h("div", { class: "overview" }, this.toolbar.element, this.grid, this.topics);
    this.ready = this.start().then(() => this.reveal(params.show));
  }

  async start() {
    const { names, notes } = await source.names(this.run);
    this.note(notes);
    this.known = new Map(names.map((entry) => [entry.name, entry]));
    this.cards = CHARTS.map((spec) => this.makeCard(spec)).filter(Boolean);
    const used = new Set(this.cards.flatMap((card) => card.names));
    const figures = this.cards.map(({ chart }) => chart.element);
    fill(this.grid, names.length ? [figures, this.band.element] : empty(...EMPTY));
    const unfolded = this.sections.filter(({ section }) => section.open).map(({ topic }) => topic);
    this.sections = this.makeTopics(names.filter(({ name }) => !used.has(name)));
    fill(
      this.topics,
      this.sections.map(({ section }) => section),
    );
    for (const { topic, section } of this.sections) section.open = unfolded.includes(topic);
    await this.draw();
  }

  makeCard({ title, lines, format }) {
    const present = lines.filter(([name]) => this.known.has(name));
    if (!present.length) return null;
    const chart = new Chart({
      title,
      description: present.map(([name]) => this.known.get(name).description || name).join("\n"),
      lines: present.map(([, label], index) => ({ label, color: PALETTE[index] })),
      group: "overview",
      zoom,
      format,
    });
    return { chart, names: present.map(([name]) => name) };
  }

  /** One closed section for each topic; its charts are made when it is opened. */
  makeTopics(entries) {
    const topics = new Map();
    for (const { name, topic } of entries) {
      if (!topics.has(topic)) topics.set(topic, []);
      topics.get(topic).push(name);
    }
    return [...topics].map(([topic, names]) => {
      const grid = h("div", { class: "chart-grid" });
      const summary = h("summary", {}, topic, " ", h("span", { class: "count" }, names.length));
      const section = h("details", {}, summary, grid);
      section.addEventListener("toggle", () => section.open && !grid.children.length && this.openTopic(grid, names));
      return { topic, names, section };
    });
  }

  async openTopic(grid, names) {
    const added = names.map((name) => this.makeCard({ title: name, lines: [[name, ""]], format: formatOf(name) }));
    fill(
      grid,
      added.map(({ chart }) => chart.element),
    );
    this.cards.push(...added);
    await this.draw(added);
  }

  /** Brings the chart of a metric into sight: evidence of a diagnosis leads here. */
  reveal(name) {
    if (!name) return;
    const card = this.cards.find(({ names }) => names.includes(name));
    const section = this.sections.find(({ names }) => names.includes(name))?.section;
    if (section) section.open = true;
    const target = card?.chart.element ?? section;
    target?.classList.add("shown");
    target?.scrollIntoView({ block: "center" });
  }

  async draw(cards = this.cards) {
    if (!cards.length) return;
    const settings = readSettings(this.params);
    const query = { x: settings.axis, from: settings.range?.[0], to: settings.range?.[1], points: POINTS };
    const asked = this.params;
    const [{ series, notes }, phases] = await Promise.all([
      source.series(this.run, { names: cards.flatMap(({ names }) => names), ...query }),
      source.phases(this.run, query),
    ]);
    if (asked !== this.params) return; // another range was asked for meanwhile
    this.note([...notes, ...phases.notes]);
    for (const { chart, names } of cards) {
      const columns = names.map((name) => series[name]);
      chart.draw(columns, settings);
    }
    this.band.draw(phases, settings);
  }

  /** The first and the last x of the run; null before its first step. */
  async ends() {
    if (!this.cards.length) return null;
    const names = this.cards[0].names.slice(0, 1);
    const { series } = await source.series(this.run, { names, x: readSettings(this.params).axis, points: POINTS });
    const { x } = series[names[0]];
    return x.length ? [x[0], x.at(-1)] : null;
  }

  update(params) {
    const before = this.params;
    this.params = params;
    if (before.smooth === params.smooth) this.toolbar.show(readSettings(params)); // a slider that moves keeps the focus
    return this.draw();
  }

  /** New rows: redraws, and makes charts for metrics that have not been there before. */
  async grown() {
    await this.ready;
    const { names, notes } = await source.names(this.run);
    this.note(notes);
    if (names.length === this.known.size) await this.draw();
    else {
      this.closeCards();
      await this.start();
    }
  }

  closeCards() {
    for (const { chart } of this.cards) chart.close();
  }

  close() {
    this.closeCards();
    this.band.close();
  }
}
