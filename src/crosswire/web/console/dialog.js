// Dialogs: an act with its fields, the confirmation of what destroys something, and the result.

import { el, notice, put, uniqueId } from "./dom.js";

const opened = new Set();

/** Ends open dialogs without their `done`: another screen is shown. */
export function leaveDialogs() {
  for (const leave of [...opened]) leave();
}

/**
 * Asks for what an act needs, performs it, and shows its result.
 *
 * `title`; `text`, elements or texts that explain it; `fields`, see `field`; `action`, the text of
 * the button; `danger` for what can't be undone; `confirm`, a text that has to be typed in first;
 * `act(values, report)` performs it and gives what to show as its result (a text, elements, or
 * null to close at once), `report(…)` shows progress meanwhile; `dryRun(values)`, if given, adds
 * a button that shows what would happen. `done()` is called when it is closed after success.
 */
export function openDialog({ title, text, fields = [], action, danger = false, confirm = "", act, dryRun, done }) {
  const heading = uniqueId("dialog");
  const outcome = el("div", { class: "outcome", "aria-live": "polite" });
  const made = fields.map(field);
  const typed = confirm ? field({ name: "confirm", label: `Type ${confirm} to confirm` }) : null;
  const perform = el("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
  const close = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel");
  const rehearse = dryRun ? el("button", { type: "button", class: "quiet", onclick: () => run(dryRun, false) }, "Dry run") : null;
  const form = el("form", { method: "dialog" },
    el("h2", { id: heading }, title),
    text ? el("div", { class: "dialog-text" }, text) : null,
    made.map((each) => each.element), typed?.element, outcome,
    el("div", { class: "buttons" }, close, rehearse, perform));
  const dialog = el("dialog", { "aria-labelledby": heading, class: "dialog" }, form);
  const stopped = new AbortController();
  let isDone = false;

  async function run(work, isFinal) {
    const values = Object.fromEntries(made.map((each) => [each.name, each.value()]));
    put(outcome, notice("info", "Working…"));
    perform.disabled = true;
    if (rehearse) rehearse.disabled = true;
    try {
      const result = await work(values, (...children) => put(outcome, notice("info", ...children)), stopped.signal);
      if (isFinal) {
        isDone = true;
        if (result === null || result === undefined) { dialog.close(); return; }
        perform.hidden = true;
        if (rehearse) rehearse.hidden = true;
        for (const each of form.querySelectorAll("input, textarea, select")) each.disabled = true;
        put(close, "Close");
        put(outcome, notice("good", result));
        close.focus();
      } else put(outcome, notice("info", result));
    } catch (error) {
      if (error.name !== "AbortError") put(outcome, notice("bad", error.message));
    } finally {
      perform.disabled = false;
      if (rehearse) rehearse.disabled = false;
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (typed && typed.value() !== confirm) {
      put(outcome, notice("bad", `Type ${confirm} to confirm.`));
      return;
    }
    run(act, true);
  });
  function leave() {
    opened.delete(leave);
    stopped.abort();
    dialog.remove();
  }
  dialog.addEventListener("close", () => {
    leave();
    if (isDone) done?.();
  });
  opened.add(leave);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * A labelled field: `name`, `label`, `kind` (text, number, area, check, or select with `options` as
 * [value, text] pairs), `value`, `hint`, `required`. Gives its element and a function for its value.
 */
export function field({ name, label, kind = "text", value = "", options = [], hint = "", required = false, ...more }) {
  const id = uniqueId("field");
  const shared = { id, required, autocomplete: "off", spellcheck: "false",
    "aria-describedby": hint ? `${id}-hint` : null, ...more };
  let input;
  if (kind === "area") input = el("textarea", { rows: 8, ...shared, value });
  else if (kind === "select") {
    input = el("select", { id }, options.map(([each, text]) => el("option", { value: each }, text)));
    input.value = value;
  } else if (kind === "check") input = el("input", { ...shared, type: "checkbox", checked: Boolean(value) });
  else input = el("input", { ...shared, type: kind, value, step: kind === "number" ? "any" : null });
  const parts = kind === "check"
    ? el("label", { class: "check", for: id }, input, label)
    : [el("label", { for: id }, label), input];
  return {
    name,
    input,
    element: el("div", { class: "field" }, parts,
      hint ? el("p", { class: "hint", id: `${id}-hint` }, hint) : null),
    value: () => (kind === "check" ? input.checked : kind === "number" ? Number(input.value || 0) : input.value),
  };
}

let toasts = null;

/** Shows for some seconds what was done. */
export function toast(kind, ...children) {
  if (!toasts?.isConnected) {
    toasts = el("div", { class: "toasts", role: "status", "aria-live": "polite" });
    document.body.append(toasts);
  }
  const shown = el("div", { class: `toast ${kind}` }, children);
  toasts.append(shown);
  setTimeout(() => shown.remove(), 6000);
}
