// The text of a turn, coloured token by token: how it is coloured, and the legend that says so.

import { h } from "./dom.js";
import { formatNumber } from "./format.js";

const AT_ONCE = 2000; // tokens that are shown before somebody asks for more
const CHARACTERS_AT_ONCE = 20_000;

// `heat` maps a value to -1 … 1: below zero is cold, above is warm, zero has no colour. Ranges are fixed, so that
// colours of different samples can be compared.
export const COLORINGS = {
  advantage: {
    label: "Advantage",
    low: "discouraged",
    high: "encouraged",
    heat: (value) => Math.tanh(value / 1.5),
    ends: [-2, 2],
    good: true,
  },
  logprob: {
    label: "Log-probability",
    low: "certain",
    high: "surprising",
    heat: (value) => clamp(-value / 5),
    ends: [0, -5],
  },
  ratio: {
    label: "Ratio",
    low: "less likely now",
    high: "more likely now",
    heat: (value) => clamp(Math.log(value) / Math.log(1.25)),
    ends: [0.8, 1.25],
    good: true,
  },
  entropy: {
    label: "Entropy",
    low: "no choice",
    high: "many choices",
    heat: (value) => clamp(value / 3),
    ends: [0, 3],
  },
  kl: {
    label: "KL to the reference",
    low: "less likely",
    high: "more likely than the reference",
    heat: clamp,
    ends: [-1, 1],
    good: true,
  },
};

function clamp(value) {
  return Math.max(-1, Math.min(1, value));
}

/** An element with the text of a turn. `tokens` may be null: then there is nothing to colour. */
export function renderText(text, tokens, coloring) {
  if (tokens?.length) return renderTokens(tokens, coloring);
  const box = h("div", { class: "text" });
  if (text === "") box.append(h("span", { class: "quiet" }, "empty"));
  else showCharacters(box, text, 0);
  return box;
}

function renderTokens(tokens, coloring) {
  const label = "Tokens. Arrow keys read their numbers.";
  const box = h("div", { class: "text", tabindex: "0", role: "group", "aria-label": label });
  showTokens(box, tokens, coloring, 0);
  return box;
}

function showTokens(box, tokens, coloring, from) {
  const to = Math.min(from + AT_ONCE, tokens.length);
  const spans = tokens.slice(from, to).map((token) => renderToken(token, coloring));
  box.append(...spans);
  if (to < tokens.length) box.append(more(tokens.length - to, "tokens", () => showTokens(box, tokens, coloring, to)));
}

function showCharacters(box, text, from) {
  let to = Math.min(from + CHARACTERS_AT_ONCE * (from ? 10 : 1), text.length);
  if (isHighSurrogate(text.charCodeAt(to - 1))) to += 1;
  box.append(document.createTextNode(text.slice(from, to)));
  if (to < text.length) box.append(more(text.length - to, "characters", () => showCharacters(box, text, to)));
}

function isHighSurrogate(unit) {
  return unit >= 0xd800 && unit < 0xdc00;
}

function more(count, noun, show) {
  const label = `Show more: ${count.toLocaleString("en")} ${noun} left`;
  const click = (event) => {
    event.target.remove();
    show();
  };
  return h("button", { type: "button", class: "more", on: { click } }, label);
}

function renderToken(token, coloring) {
  const span = h("span", { class: "token" }, token.text);
  span.token = token;
  const value = token[coloring];
  if (value !== null && value !== undefined) paint(span, COLORINGS[coloring], value);
  return span;
}

function paint(span, { heat, good }, value) {
  const amount = heat(value);
  span.classList.add(tone(amount, good));
  span.style.setProperty("--heat", `${Math.round(Math.abs(amount) * 60)}%`);
}

function tone(amount, good) {
  if (good) return amount < 0 ? "cold" : "good";
  return amount < 0 ? "cold" : "warm";
}

export function legend(coloring) {
  const { label, low, high, ends, good } = COLORINGS[coloring];
  const kind = good ? "scale diverging" : "scale";
  return h(
    "div",
    { class: "token-legend", role: "img", "aria-label": `${label}: from ${low} to ${high}` },
    h("span", {}, `${low} ${formatNumber(ends[0])}`),
    h("span", { class: kind }),
    h("span", {}, `${formatNumber(ends[1])} ${high}`),
  );
}
