// A list of any length of which only the rows in sight exist. Rows are fetched by the page and kept: first those in
// sight, then the pages beside them. While somebody scrolls past, rows that are out of sight again are not asked for.

import { h } from "./dom.js";

const PAGE = 20; // rows of a request: groups of long completions take some time to read
const TALLEST = 8_000_000; // browsers draw nothing far beyond this many pixels, so a longer list is compressed
const SPARE = 4; // rows beyond the edges, so that a short scroll shows no gap
const AT_ONCE = 2; // requests

export class VirtualList {
  /**
   * `fetchPage(offset, limit)` gives {total, items}, and `render(item)` what is in a row; `choose(item)` is told.
   * `failed(error)` is called when rows that came into sight could not be fetched.
   */
  constructor({ label, rowHeight, fetchPage, render, choose, failed }) {
    Object.assign(this, { rowHeight, fetchPage, render, choose, failed });
    this.space = h("div", { class: "virtual-space" });
    this.element = h(
      "div",
      {
        class: "virtual-list",
        role: "listbox",
        tabindex: "0",
        "aria-label": label,
        on: { scroll: () => this.draw(), keydown: (event) => this.move(event) },
      },
      this.space,
    );
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.element);
    this.asked = 0;
    this.reset();
  }

  reset() {
    this.total = 0;
    this.pages = new Map();
    this.wanted = [];
    this.chosen = -1;
    this.version = (this.version ?? 0) + 1;
  }

  /** Forgets all rows and fetches those in sight. */
  async load() {
    this.reset();
    this.element.scrollTop = 0;
    await this.fetch(0);
  }

  /** The run has grown: fetches what is in sight again. Rows that come in above it do not move what somebody reads. */
  async refresh() {
    this.version += 1;
    const version = this.version;
    const last = this.first() + this.element.clientHeight / this.rowHeight;
    const numbers = [...new Set([Math.floor(this.first() / PAGE), Math.floor(last / PAGE)])];
    const pages = await Promise.all(numbers.map((number) => this.fetchPage(number * PAGE, PAGE)));
    if (version !== this.version) return;
    const added = pages[0].total - this.total;
    this.total = pages[0].total;
    this.pages = new Map(pages.map(({ items }, index) => [numbers[index], items]));
    this.draw();
    if (this.element.scrollTop > 0) this.element.scrollTop += added * this.rowHeight;
  }

  item(index) {
    const page = this.pages.get(Math.floor(index / PAGE));
    return Array.isArray(page) ? page[index % PAGE] : undefined;
  }

  async fetch(number) {
    if (this.pages.has(number)) return;
    this.pages.set(number, "on its way");
    const version = this.version;
    let page;
    try {
      page = await this.fetchPage(number * PAGE, PAGE);
    } catch (error) {
      this.pages.delete(number); // asked for again at the next scroll
      throw error;
    }
    if (version !== this.version) return;
    const { total, items } = page;
    this.total = total;
    this.pages.set(number, items);
    this.draw();
  }

  /** Fetches the pages that are wanted now, a few at a time. */
  ask() {
    while (this.asked < AT_ONCE && this.wanted.length > 0) {
      this.asked += 1;
      this.fetch(this.wanted.shift())
        .catch(this.failed)
        .finally(() => {
          this.asked -= 1;
          this.ask();
        });
    }
  }

  /** The pages that have rows from one index to another, and then one more on either side. */
  want(from, to) {
    const first = Math.floor(from / PAGE);
    const last = Math.floor(Math.max(to - 1, 0) / PAGE);
    const numbers = [];
    for (let number = first; number <= last; number += 1) numbers.push(number);
    numbers.push(last + 1, first - 1);
    const exists = (number) => number >= 0 && number * PAGE < this.total;
    this.wanted = numbers.filter((number) => exists(number) && !this.pages.has(number));
  }

  first() {
    const room = Math.max(this.space.offsetHeight - this.element.clientHeight, 1);
    const rows = this.element.clientHeight / this.rowHeight;
    if (this.total * this.rowHeight <= TALLEST) return this.element.scrollTop / this.rowHeight;
    return (this.element.scrollTop / room) * Math.max(this.total - rows, 0);
  }

  draw() {
    this.space.style.setProperty("height", `${Math.min(this.total * this.rowHeight, TALLEST)}px`);
    const first = this.first();
    const from = Math.max(Math.floor(first) - SPARE, 0);
    const to = Math.min(Math.ceil(first + this.element.clientHeight / this.rowHeight) + SPARE, this.total);
    const rows = [];
    for (let index = from; index < to; index += 1) rows.push(this.row(index, first));
    this.space.replaceChildren(...rows);
    this.want(from, to);
    this.ask();
    this.element.setAttribute(
      "aria-activedescendant",
      this.chosen >= from && this.chosen < to ? rowId(this.chosen) : "",
    );
  }

  row(index, first) {
    const item = this.item(index);
    const top = this.element.scrollTop + (index - first) * this.rowHeight;
    return h(
      "div",
      {
        class: "virtual-row",
        id: rowId(index),
        role: "option",
        "aria-selected": String(index === this.chosen),
        "aria-posinset": String(index + 1),
        "aria-setsize": String(this.total),
        style: { top: `${top}px`, height: `${this.rowHeight}px` },
        on: { click: () => this.pick(index) },
      },
      item === undefined ? "…" : this.render(item),
    );
  }

  async pick(index) {
    if (index < 0 || index >= this.total) return;
    this.chosen = index;
    this.reveal(index);
    this.draw();
    await this.fetch(Math.floor(index / PAGE));
    const item = this.item(index);
    if (item !== undefined && index === this.chosen) this.choose(item);
  }

  /** Marks the row of an item that was chosen elsewhere, if it has been fetched. */
  mark(isSame) {
    this.chosen = -1;
    for (const [number, page] of this.pages) {
      const at = Array.isArray(page) ? page.findIndex(isSame) : -1;
      if (at >= 0) this.chosen = number * PAGE + at;
    }
    this.draw();
  }

  reveal(index) {
    const rows = this.element.clientHeight / this.rowHeight;
    const first = this.first();
    if (index >= first && index + 1 <= first + rows) return;
    const target = index < first ? index : index + 1 - rows;
    const room = this.space.offsetHeight - this.element.clientHeight;
    const compressed = this.total * this.rowHeight > TALLEST;
    this.element.scrollTop = compressed ? (target / Math.max(this.total - rows, 1)) * room : target * this.rowHeight;
  }

  move(event) {
    const page = Math.max(Math.floor(this.element.clientHeight / this.rowHeight) - 1, 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.total, End: this.total };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.pick(Math.min(Math.max(this.chosen + moves[event.key], 0), this.total - 1));
  }

  close() {
    this.resized.disconnect();
  }
}

function rowId(index) {
  return `row-${index}`;
}
