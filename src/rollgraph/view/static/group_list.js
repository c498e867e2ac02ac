// Rows of the list of samples: a group with its rewards, or a prompt.

import { h } from "./dom.js";
import { formatNumber, plural } from "./format.js";

const KINDS = { train: "", validation: "validation", dropped: "filtered out" };

export function groupRow({ step, kind, prompt, samples }) {
  const truncated = samples.filter(({ finish }) => finish === "length").length;
  const failed = samples.filter(({ failed: why }) => why).length;
  return [
    h(
      "div",
      { class: "row-head" },
      h("span", { class: "row-step" }, step < 0 ? "before step 0" : `step ${step}`),
      KINDS[kind] && h("span", { class: `tag ${kind}` }, KINDS[kind]),
      truncated > 0 && h("span", { class: "tag warning" }, `${truncated} truncated`),
      failed > 0 && h("span", { class: "tag problem" }, `${failed} failed`),
      h("span", { class: "row-reward", title: "mean reward" }, formatNumber(mean(samples.map(({ reward }) => reward)))),
    ),
    h("div", { class: "row-prompt" }, oneLine(prompt)),
    rewardStrip(samples),
  ];
}

export function promptRow({ prompt, groups }) {
  return [
    h("div", { class: "row-head" }, h("span", { class: "row-step" }, `sampled ${plural(groups, "time")}`)),
    h("div", { class: "row-prompt two" }, oneLine(prompt)),
  ];
}

/** One bar for each sample, best to worst, between the lowest and the highest reward. */
function rewardStrip(samples) {
  const rewards = samples
    .map(({ reward }) => reward ?? 0)
    .sort((a, b) => b - a)
    .slice(0, 64);
  const low = Math.min(0, ...rewards);
  const span = Math.max(1e-9, Math.max(1, ...rewards) - low);
  const bars = rewards.map((reward) =>
    h("i", { style: { "--part": `${Math.round(((reward - low) / span) * 100)}%` } }),
  );
  return h("div", { class: "strip", "aria-hidden": "true" }, bars);
}

export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function oneLine(text) {
  return text.slice(0, 240).replace(/\s+/g, " ").trim() || "(empty prompt)";
}
