// Which metrics the overview shows, in which charts. A chart appears if the run has any of its metrics.

import { formatDuration, formatNumber } from "./format.js";

const gib = (value) => (value === null ? "\u2013" : `${formatNumber(value)} GiB`);

export const CHARTS = [
  {
    title: "Reward",
    lines: [
      ["reward", "mean"],
      ["reward/std", "standard deviation"],
    ],
  },
  {
    title: "Validation",
    lines: [
      ["validation/reward", "reward"],
      ["validation/accuracy", "accuracy"],
    ],
  },
  { title: "Validation loss", lines: [["validation/loss", "loss"]] },
  {
    title: "Preference margin",
    lines: [
      ["rewards/margins", "train"],
      ["validation/rewards/margins", "validation"],
    ],
  },
  { title: "KL to the reference", lines: [["policy/kl", "KL"]] },
  { title: "Entropy", lines: [["policy/entropy", "nats per token"]] },
  {
    title: "Completion length",
    lines: [
      ["length/mean", "mean"],
      ["length/max", "max"],
    ],
  },
  {
    title: "Truncated and constant",
    lines: [
      ["length/truncated", "truncated"],
      ["groups/frac_reward_zero_std", "groups without spread"],
    ],
  },
  {
    title: "Agreement",
    lines: [
      ["policy/token_mult_prob_error", "mean"],
      ["policy/token_mult_prob_error_max", "max"],
    ],
  },
  { title: "Gradient norm", lines: [["optimizer/grad_norm", "before clipping"]] },
  { title: "Loss", lines: [["loss", "mean"]] },
  { title: "Learning rate", lines: [["optimizer/lr", "last update"]] },
  {
    title: "Tokens per second",
    lines: [
      ["speed/tokens_per_second", "step"],
      ["speed/tokens_per_second/generate", "generate"],
      ["speed/tokens_per_second/train", "train"],
    ],
  },
  { title: "Memory", lines: [["speed/memory_gib", "peak"]], format: gib },
];

/** The format of a metric that has no chart of its own. */
export function formatOf(name) {
  return name.startsWith("speed/seconds") ? formatDuration : formatNumber;
}

export const PALETTE = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6"];
