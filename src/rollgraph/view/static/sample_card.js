// One sample: its reward and the parts of it, how it ended, and its turns.

import { source } from "./data.js";
import { fill, h } from "./dom.js";
import { formatNumber, formatSigned, plural } from "./format.js";
import { columnList } from "./prompt_block.js";
import { renderText } from "./tokens.js";

const FAILED = ["failed", "problem"];
const ENDINGS = new Map([
  ["length", ["truncated", "warning"]],
  ["error", FAILED],
  ["abort", ["aborted", "problem"]],
]);

export class SampleCard {
  /** `sample` is the short form of a list; the whole sample is fetched when the card comes into sight. */
  constructor({ run, sample, rank, focused, loaded }) {
    this.run = run;
    this.sample = sample;
    this.loaded = loaded;
    this.coloring = "";
    this.whole = null;
    this.body = h("div", { class: "turns" }, h("div", { class: "text loading" }, sample.text_preview));
    this.foot = h("div", {});
    this.element = h(
      "article",
      {
        class: "card",
        tabindex: "-1",
        "aria-label": `Sample ${rank}, reward ${formatNumber(sample.reward)}`,
        on: { focusin: focused },
      },
      this.head(rank),
      rewardParts(sample),
      this.body,
      this.foot,
    );
    this.seen = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && this.load());
    this.seen.observe(this.element);
  }

  head(rank) {
    const { reward, advantage, tokens, finish, failed, reasons } = this.sample;
    const [label, tone] = failed ? FAILED : (ENDINGS.get(finish) ?? []);
    return h(
      "header",
      {},
      h("span", { class: "rank" }, rank),
      h("span", { class: "reward", title: "reward" }, formatNumber(reward)),
      label && h("span", { class: `tag ${tone}`, title: reasons?.join(" ") }, label),
      h("span", { class: "spacer" }),
      advantage !== null &&
        h(
          "span",
          { class: "fact", title: "advantage" },
          "adv ",
          h("b", { class: direction(advantage) }, formatSigned(advantage)),
        ),
      h("span", { class: "fact" }, plural(tokens ?? 0, "token")),
    );
  }

  load() {
    this.seen.disconnect();
    this.loading ??= this.fetch();
    return this.loading;
  }

  async fetch() {
    try {
      this.whole = await source.sample(this.run, this.sample.id);
    } catch (error) {
      fill(this.foot, h("p", { class: "reason" }, error.message));
      return;
    }
    this.draw();
    this.loaded();
  }

  /** Why tokens cannot be coloured by a value that this sample does not have; empty if they can. */
  missing(coloring) {
    if (!this.whole || !coloring) return [];
    const colored = this.whole.turns.some(({ tokens }) => tokens?.some((token) => (token[coloring] ?? null) !== null));
    return colored ? [] : this.whole.notes;
  }

  paint(coloring) {
    if (coloring === this.coloring) return;
    this.coloring = coloring;
    if (this.whole) this.draw();
  }

  draw() {
    const { turns, reasons = [], extra } = this.whole;
    const shown = turns.filter(({ role }) => role !== "prompt");
    fill(
      this.body,
      shown.map((turn) => renderTurn(turn, this.coloring, shown.length > 1)),
    );
    fill(
      this.foot,
      reasons.map((reason) => h("p", { class: "reason" }, reason)),
      extra && columnList(Object.entries(extra)),
    );
  }

  mark(selected) {
    this.element.setAttribute("tabindex", selected ? "0" : "-1");
    this.element.classList.toggle("selected", selected);
  }

  close() {
    this.seen.disconnect();
  }
}

function direction(advantage) {
  if (advantage === 0) return "";
  return advantage < 0 ? "down" : "up";
}

/** What each reward function returned and, if it has a weight, what that adds to the reward. */
function rewardParts({ rewards, weighted_rewards: weighted = {} }) {
  const parts = Object.entries(rewards ?? {});
  if (!parts.length) return null;
  const largest = Math.max(1, ...parts.map(([, value]) => Math.abs(value ?? 0)));
  const rows = parts.map(([name, value]) => {
    const share = `${Math.round((Math.abs(value ?? 0) / largest) * 100)}%`;
    const adds = (Object.hasOwn(weighted, name) ? weighted[name] : null) ?? value;
    const text = adds === value ? formatNumber(value) : `${formatNumber(value)} → ${formatSigned(adds)}`;
    return [h("dt", {}, name), h("dd", { class: value < 0 ? "minus" : "", style: { "--part": share } }, text)];
  });
  return h("dl", { class: "parts" }, rows);
}

/** What the policy wrote is plain; what a tool or an environment answered stands apart, under its name. */
function renderTurn({ role, text, reward, tokens }, coloring, several) {
  const reply = role !== "policy";
  const given =
    reward !== null && reward !== undefined && h("span", { class: "fact" }, `reward ${formatNumber(reward)}`);
  const label = (several || reply) && h("div", { class: "role" }, role, given);
  return h(
    "div",
    { class: reply ? "turn reply" : "turn" },
    label,
    renderText(text ?? "", coloring ? tokens : null, coloring),
  );
}
