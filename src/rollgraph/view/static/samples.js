// What the model wrote: a filter, a list of groups or prompts, and beside it the one that was chosen.

import { source } from "./data.js";
import { empty, fill, h, refill, segmented } from "./dom.js";
import { plural } from "./format.js";
import { groupRow, promptRow } from "./group_list.js";
import { GroupView, groupKey } from "./group_view.js";
import { PromptHistory } from "./prompt_history.js";
import { change } from "./route.js";
import { FILTERS, SampleFilter } from "./sample_filter.js";
import { VirtualList } from "./virtual_list.js";

const MODES = Object.entries({ "": "By step", prompts: "By prompt" });
const KEY = /^(-?\d+)\.(train|validation|dropped)\.(-?\d+)$/; // what groupKey writes, in links from anywhere
const GONE = ["This group is not here", "It may belong to another run, or the run was resumed from an earlier step."];
const NO_MATCH = ["No sample matches", "Change the search or the filters above."];
const NONE_YET = ["No samples yet", "A run writes some groups of every log.samples_every-th step."];

export class Samples {
  constructor({ run, params, note }) {
    this.run = run.id;
    this.params = params;
    this.note = note;
    this.shown = null;
    this.count = h("span", { class: "count", role: "status" });
    this.stopped = h("p", { class: "stopped", role: "status" });
    this.modes = h("div", {});
    const apply = (values) => change({ ...values, open: "", prompt: "" }, { replace: true });
    this.filter = new SampleFilter(params, apply);
    this.list = new VirtualList({
      label: "Groups of samples, newest first",
      rowHeight: 68,
      fetchPage: (offset, limit) => this.fetchPage(offset, limit),
      render: (item) => (this.mode() === "prompts" ? promptRow(item) : groupRow(item)),
      choose: (item) => this.choose(item),
      failed: (error) => note([error.message]),
    });
    this.detail = h("section", { class: "detail", "aria-label": "Samples of a group" });
    const aside = h(
      "div",
      { class: "browse" },
      h("div", { class: "list-head" }, this.modes, this.count, this.stopped),
      this.list.element,
    );
    this.element = h(
      "div",
      { class: "samples" },
      this.filter.element,
      h("div", { class: "split" }, aside, this.detail),
    );
    this.showModes();
    this.ready = this.start();
  }

  mode() {
    return this.params.list === "prompts" ? "prompts" : "groups";
  }

  choose(item) {
    const chosen = this.mode() === "prompts" ? { prompt: item.key, open: "" } : { open: groupKey(item), prompt: "" };
    change(chosen, { replace: Boolean(this.params.open || this.params.prompt) });
  }

  async start() {
    await this.list.load();
    await this.showDetail();
  }

  async fetchPage(offset, limit) {
    if (this.mode() === "prompts") return this.fetchPrompts(offset, limit);
    const query = { ...this.filter.query(), offset, limit };
    const { total, groups, steps, stopped, notes } = await source.samples(this.run, query);
    this.note(notes);
    this.stopped.textContent = stopped ?? "";
    this.filter.offerSteps(steps ?? []);
    return this.page(groups, total, limit, "group");
  }

  async fetchPrompts(offset, limit) {
    const { total, prompts, stopped, notes } = await source.prompts(this.run, { q: this.params.q, offset, limit });
    this.note(notes);
    this.stopped.textContent = stopped ?? "";
    return this.page(prompts, total, limit, "prompt");
  }

  /** A search for text stops at a full page: one more row then stands for all that may follow. */
  page(items, total, limit, noun) {
    const open = Boolean(this.params.q) && items.length === limit;
    this.count.textContent = open ? `at least ${plural(total, noun)}` : plural(total, noun);
    return { total: open ? total + 1 : total, items };
  }

  showModes() {
    this.element.classList.toggle("by-prompt", this.mode() === "prompts");
    const choose = (list) => change({ list, open: "", prompt: "" });
    refill(this.modes, segmented("List", MODES, this.params.list ?? "", choose));
  }

  update(params) {
    const before = this.params;
    this.params = params;
    this.filter.show(params);
    const other = ["list", ...FILTERS].some((name) => (before[name] ?? "") !== (params[name] ?? ""));
    if (!other) return this.showDetail();
    this.showModes();
    return this.start();
  }

  async showDetail() {
    const { open, prompt } = this.params;
    this.element.classList.toggle("reading", Boolean(open || prompt));
    this.element.classList.toggle("bare", this.list.total === 0);
    const byPrompt = this.mode() === "prompts";
    const key = prompt ?? (byPrompt && !open && this.list.item(0)?.key);
    if (key) return this.showPrompt(key);
    if (byPrompt && !open) return this.showNothing();
    const group = open ? await this.findGroup(open) : this.list.item(0);
    if (!group) return this.showNothing(open);
    this.list.mark((item) => groupKey(item) === groupKey(group));
    if (this.shown instanceof GroupView && this.shown.key === groupKey(group)) return this.shown.update(this.params);
    return this.replaceDetail(this.viewOf(group));
  }

  viewOf(group) {
    const move = (by) => this.list.pick(this.list.chosen + by);
    const { run, params } = this;
    return new GroupView({ run, key: groupKey(group), group, params, move });
  }

  async showPrompt(key) {
    this.list.mark((item) => (item.key ?? item.prompt_key) === key);
    if (this.shown instanceof PromptHistory && this.shown.key === key) return;
    await this.replaceDetail(new PromptHistory({ run: this.run, key, note: this.note }));
  }

  async replaceDetail(view) {
    this.shown?.close();
    this.shown = view;
    fill(this.detail, backButton(), view.element);
    this.detail.scrollTop = 0;
    await view.ready;
  }

  showNothing(open) {
    this.shown?.close();
    this.shown = null;
    const unfiltered = this.filter.isActive ? NO_MATCH : NONE_YET;
    fill(this.detail, backButton(), empty(...(open ? GONE : unfiltered)));
  }

  /** A group of the list or, from a link, one that the list has not fetched. */
  async findGroup(key) {
    for (let index = 0; index < this.list.total; index += 1) {
      const item = this.list.item(index);
      if (item === undefined) break;
      if (groupKey(item) === key) return item;
    }
    const [known, step, kind, group] = KEY.exec(key) ?? [];
    if (!known) return undefined;
    const { groups } = await source.samples(this.run, { step, kind, group, limit: 1 });
    return groups[0];
  }

  async grown() {
    await this.ready;
    await this.list.refresh();
    if (this.shown instanceof PromptHistory) await this.shown.grown();
    else if (this.shown) await this.renewGroup();
    else await this.showDetail();
  }

  /** A group that was half written when it was read, or that a resumed run wrote again, is shown anew. */
  async renewGroup() {
    const { key, group } = this.shown;
    this.list.mark((item) => groupKey(item) === key);
    const now = this.list.item(this.list.chosen);
    if (now && JSON.stringify(now) !== JSON.stringify(group)) await this.replaceDetail(this.viewOf(now));
  }

  close() {
    this.shown?.close();
    this.list.close();
  }
}

/** On a phone, the list and a group take turns. */
function backButton() {
  const click = () => change({ open: "", prompt: "" });
  return h("button", { type: "button", class: "back", on: { click } }, "‹ All groups");
}
