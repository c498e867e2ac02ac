// The numbers of one token, in a box beside it: of the token under the pointer, or of the one that arrow keys reached.

import { h } from "./dom.js";
import { formatNumber, formatSigned } from "./format.js";
import { COLORINGS } from "./tokens.js";

const MOVES = { ArrowLeft: -1, ArrowRight: 1 };
const GAP = 6; // pixels between a token and the box

/** The box for all tokens in `container`, to be put anywhere. */
export function tokenTips(container) {
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const hide = () => (tip.hidden = true);
  container.addEventListener("pointerover", (event) => show(tip, event.target));
  container.addEventListener("pointerleave", hide);
  container.addEventListener("keydown", (event) => readNext(tip, event));
  container.addEventListener("focusout", () => {
    container.querySelector(".token.read")?.classList.remove("read");
    hide();
  });
  return tip;
}

/** Whether an arrow key was pressed on tokens, which then move from one to the next. */
export function isOnTokens({ target }) {
  return target.matches(".text[tabindex]");
}

function readNext(tip, event) {
  if (!(event.key in MOVES) || !isOnTokens(event)) return;
  event.preventDefault();
  const tokens = [...event.target.querySelectorAll(".token")];
  const now = tokens.findIndex((token) => token.classList.contains("read"));
  const next = Math.min(Math.max(now + MOVES[event.key], 0), tokens.length - 1);
  tokens[now]?.classList.remove("read");
  tokens[next].classList.add("read");
  tokens[next].scrollIntoView({ block: "nearest", inline: "nearest" });
  show(tip, tokens[next]);
}

function show(tip, element) {
  const { token } = element;
  const known = Object.entries(COLORINGS).filter(([name]) => (token?.[name] ?? null) !== null);
  tip.hidden = !known.length;
  if (tip.hidden) return;
  const rows = known.map(([name, { label }]) => {
    const value = name === "advantage" ? formatSigned(token[name]) : formatNumber(token[name]);
    return h("div", {}, h("span", {}, label), h("b", {}, value));
  });
  tip.replaceChildren(h("code", {}, JSON.stringify(token.text).slice(0, 200)), ...rows);
  place(tip, element.getBoundingClientRect());
}

/** Below the token or, where there is no room, above it. */
function place(tip, { left, top, bottom }) {
  const below = bottom + GAP + tip.offsetHeight <= innerHeight;
  tip.style.setProperty("left", `${Math.max(0, Math.min(left, innerWidth - tip.offsetWidth - GAP))}px`);
  tip.style.setProperty("top", `${below ? bottom + GAP : top - GAP - tip.offsetHeight}px`);
}
