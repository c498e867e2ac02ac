// What the machine did: memory against its plan, ranks, and graphs.

import { source } from "./data.js";
import { empty, fill, h } from "./dom.js";
import { formatBytes, formatCount, formatDuration, plural } from "./format.js";
import { hasMemory, memorySection } from "./machine_memory.js";
import { phaseColor } from "./phase_band.js";
import { table } from "./table.js";

const GIB = 2 ** 30;
const SECONDS = "seconds/"; // and the name of a phase

export class Machine {
  constructor({ run, note }) {
    this.run = run.id;
    this.note = note;
    this.element = h("div", { class: "machine" });
    this.ready = this.load();
  }

  async load() {
    const { device, versions, graphs, memory, ranks, notes } = await source.machine(this.run);
    this.note(notes);
    const parts = [
      device && deviceLine(device, versions ?? {}),
      hasMemory(memory) && memorySection(memory),
      ranks.length > 0 && rankSection(ranks),
      graphs && graphSection(graphs), // last, because it can be long
    ];
    const nothing = empty("Nothing is known about the machine yet", "The graph report is written when a run ends.");
    const unfolded = this.details().map(({ open }) => open);
    fill(this.element, parts.some(Boolean) ? parts : nothing);
    this.details().forEach((one, index) => (one.open = unfolded[index] ?? one.open)); // somebody may be reading it
  }

  details() {
    return [...this.element.querySelectorAll("details")];
  }

  update() {}

  grown() {
    return this.load();
  }

  close() {}
}

function deviceLine(device, { platform, ...versions }) {
  const parts = Object.entries(versions)
    .filter(([, version]) => version)
    .map(([name, version]) => `${name} ${version}`);
  return h(
    "p",
    { class: "device", title: platform },
    h("b", {}, device),
    h("span", { class: "quiet" }, parts.join(" · ")),
  );
}

function graphSection({ graphs, pool_bytes, notes = [] }) {
  const sum = (read) => graphs.reduce((total, graph) => total + read(graph), 0);
  const facts = [
    ["graphs", formatCount(graphs.length)],
    ["captures", formatCount(sum(({ captures }) => captures))],
    ["replays", formatCount(sum(({ replays }) => replays))],
    ["eager runs", formatCount(sum(eagerRuns))],
    ["pool memory", formatBytes(pool_bytes)],
  ];
  const head = ["Graph", "Backend", "Operations", "Memory", "Captures", "Replays", "Eager runs"];
  const rows = graphs.flatMap(graphRows);
  return h(
    "section",
    {},
    h("h2", {}, "Graphs"),
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
    table(head, rows),
    notes.length > 0 && remarks(notes),
  );
}

/** Notes about all graphs: how products were made to agree, for instance. */
function remarks(notes) {
  const items = notes.map((note) => h("li", {}, note));
  return h("details", { class: "more-about" }, h("summary", {}, plural(notes.length, "note")), h("ul", {}, items));
}

function eagerRuns({ eager_runs = {} }) {
  return Object.values(eager_runs).reduce((sum, count) => sum + count, 0);
}

/** A row of numbers and, below it, why the graph ran eagerly. */
function graphRows(graph) {
  const eager = eagerRuns(graph);
  const replays = graph.backward_replays
    ? `${formatCount(graph.replays)} + ${formatCount(graph.backward_replays)} backward`
    : formatCount(graph.replays);
  const row = h(
    "tr",
    {},
    h("th", { scope: "row", title: graph.surface }, graph.name),
    h("td", {}, graph.backend),
    h("td", { class: "number" }, formatCount(graph.operations)),
    h("td", { class: "number" }, formatBytes(graph.bytes_owned)),
    h("td", { class: "number" }, formatCount(graph.captures)),
    h("td", { class: "number" }, replays),
    h("td", { class: eager ? "number attention" : "number" }, formatCount(eager)),
  );
  const reasons = Object.entries(graph.eager_runs ?? {}).map(([why, count]) => `${formatCount(count)} eager: ${why}`);
  const remarks = [...reasons, ...(graph.notes ?? [])];
  return [row, ...remarks.map((text) => h("tr", { class: "remark" }, h("td", { colspan: "7" }, text)))];
}

function rankSection(ranks) {
  const slowest = Math.max(1e-9, ...ranks.map(({ step_seconds }) => step_seconds));
  const rows = ranks.map(({ rank, step_seconds, values }) => {
    const phases = Object.entries(values).filter(([name]) => name.startsWith(SECONDS));
    const parts = phases.length ? phases : [[`${SECONDS}step`, step_seconds]];
    const bars = parts.map(([name, seconds]) => phaseBar(name.slice(SECONDS.length), seconds, slowest));
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, `rank ${rank}`),
      h("td", { class: "bars" }, h("div", { class: "phases" }, bars)),
      h("td", { class: "number" }, formatDuration(step_seconds)),
      h("td", { class: "number" }, "memory_gib" in values ? formatBytes(values.memory_gib * GIB) : "–"),
    );
  });
  const several = ranks.length > 1;
  const what = several ? "without waiting for the other ranks, " : "";
  const note = h("span", { class: "quiet" }, `${what}mean of the last steps, by phase`);
  const head = ["Rank", "", several ? "Own time" : "Step time", "Peak memory"];
  return h("section", {}, h("h2", {}, "Ranks", note), phaseLegend(ranks), table(head, rows));
}

function phaseLegend(ranks) {
  const names = ranks.flatMap(({ values }) => Object.keys(values)).filter((name) => name.startsWith(SECONDS));
  const phases = [...new Set(names)].map((name) => name.slice(SECONDS.length));
  const keys = phases.map((phase) => {
    const mark = h("i", { class: "swatch", style: { background: `var(--${phaseColor(phase)})` } });
    return h("span", { class: "key" }, mark, phase);
  });
  return h("div", { class: "legend" }, keys);
}

function phaseBar(phase, seconds, slowest) {
  const share = `${(seconds / slowest) * 100}%`;
  const title = `${phase} ${formatDuration(seconds)}`;
  return h("i", { title, style: { "--part": share, background: `var(--${phaseColor(phase)})` } });
}
