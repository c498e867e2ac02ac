// The answers of several runs to one prompt that all of them have seen: the best and the worst of the newest group.

import { source } from "./data.js";
import { h, select } from "./dom.js";
import { formatNumber } from "./format.js";
import { mean, oneLine } from "./group_list.js";
import { groupKey } from "./group_view.js";
import { linkTo } from "./route.js";
import { renderText } from "./tokens.js";

const NONE = "These runs share no prompt. With equal data, seed and ranks, validation prompts are shared.";

/** Elements for the section. `shared` are the prompts of all runs, `chosen` the key of one; without it, the first. */
export async function promptColumns(runs, shared, chosen, choose, colorOf) {
  if (!shared.length) return h("p", { class: "quiet" }, NONE);
  const key = shared.some((prompt) => prompt.key === chosen) ? chosen : shared[0].key;
  const options = shared.map((prompt) => [prompt.key, oneLine(prompt.prompt).slice(0, 90)]);
  const columns = await Promise.all(runs.map((run) => column(run, key, colorOf(run))));
  return [
    h("label", { class: "field wide" }, "Prompt ", select("Prompt", options, key, choose)),
    h("div", { class: "cards compared" }, columns),
  ];
}

async function column(run, key, color) {
  const { groups } = await source.prompt(run.id, key);
  const group = groups.at(-1);
  const { samples } = group; // best to worst
  const shown = samples.length > 1 ? [samples[0], samples.at(-1)] : samples;
  const answers = await Promise.all(shown.map((sample, index) => answer(run, sample, index ? "worst" : "best")));
  const step = h("a", { href: linkTo("samples", { run: run.id, open: groupKey(group) }) }, `step ${group.step}`);
  const average = h("span", { class: "fact" }, `mean ${formatNumber(mean(samples.map(({ reward }) => reward)))}`);
  const swatch = h("i", { class: "swatch", style: { background: `var(--${color})` } });
  const head = h("header", {}, swatch, h("b", {}, run.name), h("span", { class: "spacer" }), step, average);
  return h("article", { class: "card" }, head, answers);
}

async function answer(run, sample, label) {
  const beginning = () => ({ completion: sample.text_preview }); // an exported file does not hold every sample
  const { completion } = await source.sample(run.id, sample.id).catch(beginning);
  const reward = h("span", { class: "fact" }, `reward ${formatNumber(sample.reward)}`);
  return h("div", { class: "turn" }, h("div", { class: "role" }, label, reward), renderText(completion, null, ""));
}
