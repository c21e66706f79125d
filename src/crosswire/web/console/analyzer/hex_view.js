// The bytes of a frame in hex and ASCII. Only visible lines are elements; a cursor moves by arrow
// keys, and the bytes of the chosen field are highlighted.

import { el, put } from "../dom.js";

const AROUND = 6;
const NARROW = "(max-width: 40rem)";

/** `choose(byte)` is called when a byte is chosen. */
export function hexView({ hex, ranges, label, describe, choose }) {
  const total = hex.length / 2;
  const narrow = matchMedia(NARROW);
  const inner = el("div", { class: "hex-inner", role: "presentation" });
  const spoken = el("p", { class: "unseen", "aria-live": "polite" });
  const root = el("div", {
    class: "hex", tabindex: "0", role: "group", "aria-roledescription": "bytes",
    "aria-label": `${label}. Arrow keys move from byte to byte.`,
    onscroll: schedule, onkeydown: onKey, onclick: onClick,
  }, inner, spoken);
  let marked = null;
  let cursor = -1;
  let asked = false;
  let first = 0;
  let last = 0;

  const perLine = () => (narrow.matches ? 8 : 16);
  const lineHeight = () => parseFloat(getComputedStyle(root).lineHeight) || 20;

  function schedule() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; show(); });
  }

  function show() {
    const height = lineHeight();
    const lines = Math.ceil(total / perLine());
    inner.style.height = `${lines * height}px`;
    first = Math.max(Math.floor(root.scrollTop / height) - AROUND, 0);
    last = Math.min(Math.ceil((root.scrollTop + root.clientHeight) / height) + AROUND, lines);
    const made = [];
    for (let number = first; number < last; number += 1) {
      const each = line(number);
      each.style.top = `${number * height}px`;
      made.push(each);
    }
    put(inner, made);
  }

  function line(number) {
    const width = perLine();
    const start = number * width;
    const octets = [];
    const letters = [];
    for (let byte = start; byte < start + width; byte += 1) {
      if (byte >= total) {
        octets.push(el("span", { class: "octet" }, "  "));
        continue;
      }
      const text = hex.slice(2 * byte, 2 * byte + 2);
      const kind = classOf(byte);
      const code = parseInt(text, 16);
      octets.push(el("span", { class: `octet ${kind}`, "data-byte": byte }, text));
      letters.push(el("span", { class: `letter ${kind}`, "data-byte": byte },
        code >= 32 && code < 127 ? String.fromCharCode(code) : "·"));
    }
    return el("div", { class: "hex-line" },
      el("span", { class: "hex-offset" }, start.toString(16).padStart(4, "0")),
      el("span", { class: "octets" }, octets), el("span", { class: "letters" }, letters));
  }

  function classOf(byte) {
    const isMarked = marked && byte >= marked.start && byte < marked.end;
    const own = ranges.at(byte);
    return [own && !own.field ? "layout" : "", isMarked ? "marked" : "", byte === cursor ? "cursor" : ""].join(" ");
  }

  function onClick(event) {
    const target = event.target.closest("[data-byte]");
    if (target) pick(Number(target.dataset.byte));
  }

  function pick(byte) {
    cursor = byte;
    choose(byte);
    put(spoken, `Byte ${byte}, ${hex.slice(2 * byte, 2 * byte + 2)}, ${describe(byte)}`);
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !total) return;
    const width = perLine();
    const page = Math.max(Math.floor(root.clientHeight / lineHeight()) - 1, 1) * width;
    const steps = {
      ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width,
      PageDown: page, PageUp: -page, Home: -total, End: total,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const from = cursor < 0 ? (marked?.start ?? 0) - (steps[event.key] > 0 ? steps[event.key] : 0) : cursor;
    pick(Math.min(Math.max(from + steps[event.key], 0), total - 1));
    reveal(cursor);
  }

  function reveal(byte) {
    const height = lineHeight();
    const top = Math.floor(byte / perLine()) * height;
    if (top < root.scrollTop) root.scrollTop = top;
    else if (top + height > root.scrollTop + root.clientHeight) root.scrollTop = top + height - root.clientHeight;
  }

  const resize = new ResizeObserver(schedule);
  resize.observe(root);

  return {
    root,
    leave: () => resize.disconnect(),
    /** Highlights the bytes of a range; null for none. */
    mark(range, { keepCursor = false } = {}) {
      marked = range;
      if (!keepCursor) cursor = -1;
      if (range && range.end > range.start) reveal(range.start);
      show();
    },
  };
}
