// A list of any length of which only the visible rows are elements, for mouse, keyboard and screen
// reader: a listbox whose options have a fixed height.

import { el, uniqueId } from "../dom.js";

const AROUND = 10; // rows above and below the visible ones, so that scrolling shows no gaps
const NEAR = 60; // rows before the end at which more are asked for

/**
 * `rowHeight()` is in pixels, `fill(option, index)` shows a row, `choose(index)` is called when
 * another one is chosen, `nearEnd()` when the end comes into sight.
 */
export function virtualList({ label, rowHeight, fill, choose, nearEnd, open }) {
  const inner = el("div", { role: "presentation", class: "virtual-inner" });
  const root = el("div", {
    class: "virtual", role: "listbox", tabindex: "0", "aria-label": label,
    onscroll: schedule, onkeydown: onKey, onclick: onClick,
  }, inner);
  const prefix = uniqueId("row");
  let size = 0;
  let chosen = -1;
  let height = rowHeight();
  let asked = false;
  const shown = new Map();

  function schedule() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; show(); });
  }

  function show() {
    const first = Math.max(Math.floor(root.scrollTop / height) - AROUND, 0);
    const last = Math.min(Math.ceil((root.scrollTop + root.clientHeight) / height) + AROUND, size);
    for (const [index, option] of shown) {
      if (index < first || index >= last) {
        option.remove();
        shown.delete(index);
      }
    }
    for (let index = first; index < last; index += 1) {
      if (!shown.has(index)) add(index);
    }
    if (size && last >= size - NEAR) nearEnd?.();
  }

  function add(index) {
    const option = el("div", {
      id: `${prefix}-${index}`, role: "option", class: "virtual-row", "data-index": index,
      "aria-selected": index === chosen ? "true" : "false",
      "aria-posinset": index + 1, "aria-setsize": size,
    });
    option.style.top = `${index * height}px`;
    option.style.height = `${height}px`;
    fill(option, index);
    shown.set(index, option);
    // In the order of rows, which is also the order in which they are read aloud.
    const after = [...inner.children].find((each) => Number(each.dataset.index) > index);
    inner.insertBefore(option, after ?? null);
  }

  function onClick(event) {
    const option = event.target.closest("[role=option]");
    if (option) choose(Number(option.dataset.index));
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(Math.floor(root.clientHeight / height) - 1, 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -size, End: size };
    if (event.key === "Enter" && chosen >= 0) {
      event.preventDefault();
      open?.();
    }
    if (!(event.key in steps) || !size) return;
    event.preventDefault();
    const target = chosen < 0 ? 0 : chosen + steps[event.key];
    choose(Math.min(Math.max(target, 0), size - 1));
  }

  function forget() {
    for (const option of shown.values()) option.remove();
    shown.clear();
  }

  const resize = new ResizeObserver(() => {
    if (height !== rowHeight()) {
      const first = root.scrollTop / height;
      height = rowHeight();
      list.setSize(size);
      root.scrollTop = first * height;
    }
    schedule();
  });
  resize.observe(root);

  const list = {
    root,
    /** Stop watching its size. */
    leave: () => resize.disconnect(),
    /** There are so many rows now; those that are shown are shown anew. */
    setSize(count) {
      size = count;
      inner.style.height = `${count * height}px`;
      forget();
      show();
    },
    /** Rows were added at the end; `removed` at the begin. */
    grow(count, removed = 0) {
      const wasAtEnd = list.isAtEnd();
      size = count;
      inner.style.height = `${count * height}px`;
      if (removed) {
        forget();
        chosen = chosen >= removed ? chosen - removed : -1;
        if (!wasAtEnd) root.scrollTop = Math.max(root.scrollTop - removed * height, 0);
      }
      show();
    },
    isAtEnd: () => root.scrollTop + root.clientHeight >= size * height - height,
    toEnd() {
      root.scrollTop = size * height;
      show();
    },
    /** Marks a row as the chosen one, and scrolls to it. -1 for none. */
    mark(index, { scroll = true } = {}) {
      shown.get(chosen)?.setAttribute("aria-selected", "false");
      chosen = index;
      if (index < 0) {
        root.removeAttribute("aria-activedescendant");
        return;
      }
      const top = index * height;
      if (scroll && top < root.scrollTop) root.scrollTop = top;
      else if (scroll && top + height > root.scrollTop + root.clientHeight) {
        root.scrollTop = top + height - root.clientHeight;
      }
      show();
      shown.get(index)?.setAttribute("aria-selected", "true");
      root.setAttribute("aria-activedescendant", `${prefix}-${index}`);
    },
    get chosen() { return chosen; },
  };
  return list;
}
