// The filters of the analyzer; their values are in the URL.

import { el, uniqueId } from "../dom.js";
import { visible } from "../format.js";

/**
 * `fields`: {name, label, options?: [[value, text]], check?: true, wide?: true}; `change()` is
 * called when one has another value, which is in the screen's query then.
 */
export function filterForm(screen, fields, change) {
  const form = el("form", { class: "filters", role: "search", "aria-label": "Filter frames", onsubmit: (event) => { event.preventDefault(); } });
  const timers = new Map();
  for (const field of fields) form.append(control(field));

  function control({ name, label, options, check, wide }) {
    const id = uniqueId("filter");
    const value = screen.query[name] ?? "";
    const set = (next) => {
      screen.setQuery({ [name]: next, n: "", field: "" });
      change();
    };
    if (check) {
      return el("div", { class: "field" }, el("label", { class: "check", for: id },
        el("input", { id, type: "checkbox", checked: value === "true", onchange: (event) => set(event.target.checked ? "true" : "") }), label));
    }
    if (options) {
      const known = options.some(([each]) => each === value);
      const all = known || !value ? options : [...options, [value, value]];
      return el("div", { class: "field" }, el("label", { for: id }, label),
        el("select", { id, onchange: (event) => set(event.target.value) },
          all.map(([each, text]) => el("option", { value: each, selected: each === value }, visible(text)))));
    }
    return el("div", { class: wide ? "field wide" : "field" }, el("label", { for: id }, label),
      el("input", { id, type: "search", value, autocomplete: "off", spellcheck: "false",
        oninput: (event) => {
          // When the typing pauses. Each field has a timer of its own: none stops another's.
          clearTimeout(timers.get(name));
          timers.set(name, setTimeout(() => set(event.target.value), 300));
        } }));
  }
  screen.signal.addEventListener("abort", () => { for (const timer of timers.values()) clearTimeout(timer); });
  return form;
}

/** A filter that is no field of the form, with a way to end it. */
export function conversationChip(screen, end) {
  if (!screen.query.conversation) return null;
  return el("p", { class: "chip" }, "Only the conversation ", el("code", {}, visible(screen.query.conversation)), " ",
    el("button", { type: "button", class: "quiet", onclick: end }, "Show all frames"));
}
