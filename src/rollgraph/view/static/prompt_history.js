// One prompt over the steps of a run: how its answers changed.

import { Chart } from "./chart.js";
import { source } from "./data.js";
import { fill, h } from "./dom.js";
import { formatNumber, plural } from "./format.js";
import { mean, oneLine } from "./group_list.js";
import { groupKey } from "./group_view.js";
import { promptBlock } from "./prompt_block.js";
import { linkTo, readRoute } from "./route.js";

const AT_ONCE = 100;

export class PromptHistory {
  constructor({ run, key, note }) {
    this.run = run;
    this.key = key;
    this.note = note;
    this.chart = new Chart({
      title: "Reward of its answers",
      lines: [{ label: "mean, lowest to highest", color: "series-1" }],
      height: 130,
    });
    this.element = h("div", { class: "group history" });
    this.ready = this.load();
  }

  async load() {
    const { prompt, groups, notes } = await source.prompt(this.run, this.key);
    this.note(notes);
    this.count = groups.length;
    const heading = h("h2", {}, "One prompt over steps", h("span", { class: "quiet" }, plural(groups.length, "group")));
    this.body = h("tbody", {});
    const head = h(
      "tr",
      {},
      ["Step", "Mean", "Best answer", "Worst answer"].map((text) => h("th", { scope: "col" }, text)),
    );
    const table = h("table", { class: "answers" }, h("thead", {}, head), this.body);
    fill(
      this.element,
      h("div", { class: "group-head" }, heading),
      promptBlock({ prompt, columns: groups.at(-1)?.columns }),
      this.chart.element,
      table,
    );
    this.showRows([...groups].reverse(), 0);
    this.chart.draw([rewardColumns(groups)], {});
  }

  async grown() {
    await this.ready;
    if ((await source.groupsOfPrompt(this.run, this.key)) !== this.count) await this.load();
  }

  showRows(groups, from) {
    const run = readRoute().params.run;
    for (const group of groups.slice(from, from + AT_ONCE)) {
      const { samples } = group; // best to worst
      const address = linkTo("samples", { run, open: groupKey(group) });
      const step = h("a", { href: address }, group.step < 0 ? "start" : group.step);
      const average = formatNumber(mean(samples.map(({ reward }) => reward)));
      const cells = [
        h("td", {}, step),
        h("td", { class: "number" }, average),
        answer(samples[0]),
        answer(samples.length > 1 ? samples.at(-1) : null),
      ];
      this.body.append(h("tr", {}, cells));
    }
    const next = from + AT_ONCE;
    if (next >= groups.length) return;
    const click = (event) => {
      event.target.closest("tr").remove();
      this.showRows(groups, next);
    };
    const more = h(
      "button",
      { type: "button", class: "more", on: { click } },
      `Show more: ${plural(groups.length - next, "group")} left`,
    );
    this.body.append(h("tr", {}, h("td", { colspan: "4" }, more)));
  }

  close() {
    this.chart.close();
  }
}

function answer(sample) {
  if (!sample) return h("td", {});
  return h(
    "td",
    {},
    h("span", { class: "reward" }, formatNumber(sample.reward)),
    h("span", { class: "answer" }, oneLine(sample.text_preview)),
  );
}

function rewardColumns(groups) {
  const rewards = groups.map(({ samples }) => samples.map(({ reward }) => reward).filter((reward) => reward !== null));
  return {
    x: groups.map(({ step }) => step),
    y: rewards.map(mean),
    low: rewards.map((values) => (values.length ? Math.min(...values) : null)),
    high: rewards.map((values) => (values.length ? Math.max(...values) : null)),
  };
}
