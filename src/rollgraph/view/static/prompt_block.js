// A prompt, and the other columns of its row.

import { h } from "./dom.js";
import { formatValue } from "./format.js";
import { renderText } from "./tokens.js";

const LONG = 600; // characters above which a prompt is folded

export function promptBlock({ prompt, columns }) {
  const text = renderText(prompt, null, "");
  const folded = prompt.length > LONG || prompt.split("\n").length > 8;
  const block = h("div", { class: folded ? "prompt folded" : "prompt" }, h("h3", {}, "Prompt"), text);
  if (folded) block.append(foldButton(block));
  const entries = Object.entries(columns ?? {});
  if (entries.length) block.append(columnList(entries));
  return block;
}

function foldButton(block) {
  const click = () => {
    const folded = block.classList.toggle("folded");
    button.textContent = folded ? "Show the whole prompt" : "Fold the prompt";
    button.setAttribute("aria-expanded", String(!folded));
  };
  const button = h(
    "button",
    { type: "button", class: "more", "aria-expanded": "false", on: { click } },
    "Show the whole prompt",
  );
  return button;
}

export function columnList(entries) {
  return h(
    "dl",
    { class: "columns" },
    entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, formatValue(value).slice(0, 400))]),
  );
}
