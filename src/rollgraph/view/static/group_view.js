// A group: its prompt, and its samples side by side, best to worst, or one at a time.

import { fill, h, iconButton, refill, segmented, select } from "./dom.js";
import { plural } from "./format.js";
import { highlight } from "./highlight.js";
import { promptBlock } from "./prompt_block.js";
import { change, linkTo, readRoute } from "./route.js";
import { SampleCard } from "./sample_card.js";
import { isOnTokens, tokenTips } from "./token_tips.js";
import { COLORINGS, legend } from "./tokens.js";

const KINDS = { train: "trained on", validation: "validation", dropped: "filtered out: sampled, but not trained on" };
const LAYOUTS = Object.entries({ "": "Side by side", single: "One at a time" });
const COLORS = [["", "Nothing"], ...Object.entries(COLORINGS).map(([name, { label }]) => [name, label])];
const BRIEF = 100; // characters: a group of nothing longer is shown in rows instead of one that scrolls

export class GroupView {
  /** `move(by)` chooses the group that many rows further in the list. */
  constructor({ run, key, group, params, move }) {
    this.key = key;
    this.group = group;
    this.params = params;
    this.controls = h("div", { class: "toolbar plain" });
    this.place = h("span", { class: "quiet", role: "status" });
    this.missing = h("p", { class: "quiet missing", role: "status" });
    this.row = h("div", { class: "cards", on: { keydown: (event) => this.onKey(event) } });
    this.cards = group.samples.map((sample, index) => this.makeCard(run, sample, index));
    this.row.classList.toggle(
      "brief",
      group.samples.every(({ text_preview }) => text_preview.length < BRIEF),
    );
    fill(
      this.row,
      this.cards.map(({ element }) => element),
    );
    this.element = h(
      "div",
      { class: "group" },
      this.heading(move),
      promptBlock(group),
      this.controls,
      this.missing,
      this.row,
      tokenTips(this.row),
    );
    this.select(0);
    this.show();
    this.ready = Promise.all(this.cards.slice(0, 3).map((card) => card.load()));
  }

  makeCard(run, sample, index) {
    const focused = () => this.select(index);
    const loaded = () => {
      this.showMissing();
      highlight(this.element, this.params.q);
    };
    return new SampleCard({ run, sample, rank: index + 1, focused, loaded });
  }

  showMissing() {
    const { color } = this.settings();
    const notes = new Set(this.cards.flatMap((card) => card.missing(color)));
    this.missing.textContent = [...notes].join(" ");
  }

  heading(move) {
    const { step, group, kind, samples, prompt_key } = this.group;
    const history = prompt_key !== undefined && linkTo("samples", { run: readRoute().params.run, prompt: prompt_key });
    const facts = `group ${group} · ${plural(samples.length, "sample")} · ${KINDS[kind] ?? kind}`;
    return h(
      "div",
      { class: "group-head" },
      h("h2", {}, step < 0 ? "Before the first step" : `Step ${step}`, h("span", { class: "quiet" }, facts)),
      history && h("a", { class: "button", href: history }, "Follow this prompt"),
      iconButton("‹", "Previous group", () => move(-1)),
      iconButton("›", "Next group", () => move(1)),
    );
  }

  settings() {
    const { color = "", layout = "" } = this.params;
    return { color: Object.hasOwn(COLORINGS, color) ? color : "", layout };
  }

  show() {
    const { color, layout } = this.settings();
    this.row.classList.toggle("single", layout === "single");
    const choose = (name) => (value) => change({ [name]: value }, { replace: true });
    const colors = select("Colour tokens by", COLORS, color, choose("color"));
    refill(
      this.controls,
      segmented("Layout", LAYOUTS, layout, choose("layout")),
      h("label", { class: "field" }, "Colour by ", colors),
      color && legend(color),
      layout === "single" && this.turner(),
    );
    for (const card of this.cards) card.paint(color);
    this.showMissing();
    highlight(this.element, this.params.q);
  }

  /** What arrow keys do, for those who have none. */
  turner() {
    const better = iconButton("‹", "Better sample", () => this.move(-1));
    return h("div", { class: "turner" }, better, this.place, iconButton("›", "Worse sample", () => this.move(1)));
  }

  update(params) {
    this.params = params;
    this.show();
  }

  /** Marks a card; in the layout with one at a time it is the one that is shown. */
  select(index) {
    this.selected = index;
    this.place.textContent = `sample ${index + 1} of ${this.cards.length}`;
    this.cards.forEach((card, at) => card.mark(at === index));
  }

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (!(event.key in moves) || isOnTokens(event) || event.target.closest("button, select, input, summary")) return;
    event.preventDefault();
    this.move(moves[event.key]);
    this.cards[this.selected].element.focus();
  }

  move(by) {
    this.select(Math.min(Math.max(this.selected + by, 0), this.cards.length - 1));
  }

  close() {
    highlight(this.element, "");
    for (const card of this.cards) card.close();
  }
}

export function groupKey({ step, kind, group }) {
  return `${step}.${kind}.${group}`;
}
