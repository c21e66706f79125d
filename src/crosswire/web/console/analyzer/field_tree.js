// The fields of a frame as a tree: arrow keys walk it, and the chosen field is shown in the bytes.

import { el } from "../dom.js";
import { visible } from "../format.js";
import { pathName, pathText } from "./frame_ranges.js";

const SHOWN = 200; // members of one object or list
const TEXT = 400; // characters of a value
const OPEN_LEVELS = 3;

/**
 * `fields` and `ranges` (FrameRanges) of a frame, its bytes in hex; `choose(range)` is called with
 * the range of a field that is chosen, or null for one that has none.
 */
export function fieldTree({ fields, ranges, hex, choose }) {
  const items = [];
  const root = el("ul", { class: "tree", role: "tree", "aria-label": "Fields", onkeydown: onKey });
  const names = Object.keys(fields);
  for (const key of names) root.append(item([key], fields[key], 1));
  const layout = ranges.layout;
  if (layout.length) root.append(group("Layout", layout));
  if (items.length) items[0].setAttribute("tabindex", "0");

  function item(path, value, level) {
    const range = ranges.of(path);
    const isNested = value !== null && typeof value === "object";
    const members = isNested ? Object.entries(value) : [];
    const list = members.length
      ? el("ul", { role: "group" }, members.slice(0, SHOWN).map(([key, each]) =>
        item([...path, Array.isArray(value) ? Number(key) : key], each, level + 1)))
      : null;
    if (list && members.length > SHOWN) {
      list.append(el("li", { role: "none", class: "muted tree-more" }, `… ${members.length - SHOWN} more`));
    }
    return treeItem(pathText(path), [
      el("bdi", { class: "tree-name" }, visible(String(path.at(-1)))),
      isNested ? el("span", { class: "muted" }, described(value)) : shownValue(value, range, hex),
    ], range, level, list);
  }

  function group(title, rows) {
    const list = el("ul", { role: "group" }, rows.slice(0, SHOWN).map((row) =>
      treeItem(`layout/${row.start}`, [el("span", { class: "tree-name" }, visible(pathName(row.path)))], row, 2, null)));
    return treeItem("layout", [el("span", { class: "tree-name" }, title),
      el("span", { class: "muted" }, "lengths, types, padding")], null, 1, list, false);
  }

  function treeItem(key, content, range, level, list, isOpen = level < OPEN_LEVELS) {
    const line = el("div", { class: "tree-line" },
      el("span", { class: "tree-twist", "aria-hidden": "true" }),
      el("span", { class: "tree-text" }, content),
      range ? el("span", { class: "tree-range" }, rangeText(range)) : null);
    const made = el("li", {
      role: "treeitem", tabindex: "-1", "data-key": key, "aria-level": level, "aria-selected": "false",
      "aria-expanded": list ? String(isOpen) : null,
      onclick: (event) => {
        event.stopPropagation();
        if (list && event.target.closest(".tree-twist")) toggle(made);
        else act(made);
      },
      onfocus: (event) => { if (event.target === made) roam(made); },
    }, line, list);
    made.range = range;
    items.push(made);
    return made;
  }

  function toggle(made, isOpen = made.getAttribute("aria-expanded") !== "true") {
    if (made.hasAttribute("aria-expanded")) made.setAttribute("aria-expanded", String(isOpen));
  }

  function roam(made) {
    for (const each of items) each.setAttribute("tabindex", "-1");
    made.setAttribute("tabindex", "0");
  }

  function act(made) {
    roam(made);
    made.focus({ preventScroll: true });
    choose(made.range ?? null, made.dataset.key);
  }

  function visibleItems() {
    return [...root.querySelectorAll("[role=treeitem]")].filter(
      (each) => !each.parentElement.closest('[role=treeitem][aria-expanded="false"]'));
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const made = event.target.closest("[role=treeitem]");
    if (!made) return;
    const all = visibleItems();
    const at = all.indexOf(made);
    const expanded = made.getAttribute("aria-expanded");
    let target = null;
    if (event.key === "ArrowDown") target = all[at + 1];
    else if (event.key === "ArrowUp") target = all[at - 1];
    else if (event.key === "Home") target = all[0];
    else if (event.key === "End") target = all.at(-1);
    else if (event.key === "ArrowRight") {
      if (expanded === "false") toggle(made, true);
      else if (expanded === "true") target = all[at + 1];
    } else if (event.key === "ArrowLeft") {
      if (expanded === "true") toggle(made, false);
      else target = made.parentElement.closest("[role=treeitem]");
    } else if (event.key === "Enter" || event.key === " ") target = made;
    else return;
    event.preventDefault();
    if (target) {
      act(target);
      target.querySelector(".tree-line").scrollIntoView({ block: "nearest" });
    }
  }

  /** Marks the field of a range, and opens what it is in. */
  function mark(key) {
    for (const each of items) {
      const isChosen = each.dataset.key === key;
      each.setAttribute("aria-selected", String(isChosen));
      if (!isChosen) continue;
      roam(each);
      for (let above = each.parentElement.closest("[role=treeitem]"); above; above = above.parentElement.closest("[role=treeitem]")) toggle(above, true);
      each.querySelector(".tree-line").scrollIntoView({ block: "nearest" });
    }
  }

  return { root: names.length || layout.length ? root : null, mark, keyOf, rangeOf };

  /** The key of the item that shows a range. */
  function keyOf(range) {
    return range.field ? pathText(range.path) : `layout/${range.start}`;
  }

  /** The range of the item with a key; null if there is none. */
  function rangeOf(key) {
    return items.find((each) => each.dataset.key === key)?.range ?? null;
  }
}

function described(value) {
  if (Array.isArray(value)) return value.length === 1 ? "1 item" : `${value.length} items`;
  const members = Object.keys(value).length;
  return members === 1 ? "1 member" : `${members} members`;
}

export function rangeText(range) {
  if (range.end <= range.start) return "no bytes";
  return range.end - range.start === 1 ? `${range.start}` : `${range.start}–${range.end - 1}`;
}

/** A value; bytes, which are hex, as text where they are one. */
function shownValue(value, range, hex) {
  if (typeof value !== "string") return el("code", {}, String(value));
  const bytes = range && value && hex.slice(2 * range.start, 2 * range.end) === value ? value : null;
  if (bytes === null) return el("bdi", { class: "tree-value" }, cut(visible(value)) || el("span", { class: "muted" }, "empty"));
  const text = printable(bytes);
  return [
    text === null
      ? el("code", { class: "tree-value" }, cut(bytes))
      : el("bdi", { class: "tree-value" }, "“", cut(visible(text)), "”"),
    " ", el("span", { class: "muted" }, bytes.length === 2 ? "1 byte" : `${bytes.length / 2} bytes`),
  ];
}

function cut(text) {
  return text.length <= TEXT ? text : `${text.slice(0, TEXT - 1)}…`;
}

const decoder = new TextDecoder("utf-8", { fatal: true });

/** The text in bytes, if they are one without control characters. */
function printable(hex) {
  const bytes = Uint8Array.from(hex.slice(0, 4 * TEXT).match(/../g) ?? [], (each) => parseInt(each, 16));
  try {
    const text = decoder.decode(bytes);
    // eslint-disable-next-line no-control-regex
    return /[\u0000-\u0008\u000e-\u001f\u007f]/.test(text) ? null : text;
  } catch {
    return null; // not UTF-8
  }
}
