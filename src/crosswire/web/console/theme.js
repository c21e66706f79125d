// Light or dark: the system's choice, unless this browser has another.

import { el, put } from "./dom.js";

const KEY = "crosswire-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

function chosen() {
  const found = localStorage.getItem(KEY);
  return found in NEXT ? found : "auto";
}

function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

apply(chosen());

/** A button that goes from the system's theme to light to dark. */
export function themeButton() {
  const button = el("button", { type: "button", class: "quiet theme", onclick: () => {
    const next = NEXT[chosen()];
    localStorage.setItem(KEY, next);
    apply(next);
    show();
  } });
  function show() {
    const theme = chosen();
    const text = theme === "auto" ? "system" : theme;
    put(button, el("span", { "aria-hidden": "true" }, SIGNS[theme]), el("span", { class: "unseen" }, `Theme: ${text}`));
    button.title = `Theme: ${text}`;
  }
  show();
  return button;
}
