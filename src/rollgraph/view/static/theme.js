// Light or dark: as the system says, until somebody chooses.

import { iconButton } from "./dom.js";

const KEY = "rollgraph.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

export function startTheme() {
  apply();
  system.addEventListener("change", apply);
}

export function themeSwitch() {
  const button = iconButton("\u25d0", "", toggle);
  const describe = () => {
    const label = isDark() ? "Use light colours" : "Use dark colours";
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  addEventListener("themechange", describe);
  describe();
  return button;
}

export function toggle() {
  remember(isDark() ? "light" : "dark");
  apply();
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function apply() {
  document.documentElement.dataset.theme = recall() ?? (system.matches ? "dark" : "light");
  dispatchEvent(new Event("themechange"));
}

// A page from file:// may have no storage: then the choice lasts as long as the page.
let chosen = null;

function recall() {
  try {
    return chosen ?? localStorage.getItem(KEY);
  } catch {
    return chosen;
  }
}

function remember(theme) {
  chosen = theme;
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    return;
  }
}

/** The value of a custom property of the current theme, for what is drawn on a canvas. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
