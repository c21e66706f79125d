// Tables: pages of a list that the hub sorts, filters and pages; and small ones of given rows.

import { el, emptyState, notice, put, uniqueId } from "./dom.js";
import { count } from "./format.js";

const SEARCH_MS = 30_000;

/**
 * A column: `title`; `cell(row)` gives its content; `sort`, the hub's name of the order; `number`
 * for numbers, which are set to the right and sorted from the largest; `falling` for others that
 * are; `reverse`, the name of the opposite order and how it is called where orders are chosen;
 * `hide` to leave it out on narrow screens; `label` for a title that only screen readers need.
 */
function headerCell(column, sorted, onSort) {
  const attributes = { scope: "col", role: "columnheader", class: column.number ? "number" : null };
  if (column.hide) attributes.class = `${attributes.class ?? ""} hide`.trim();
  if (!column.sort || !onSort) {
    const title = column.title || el("span", { class: "unseen" }, column.label ?? "");
    return el("th", attributes, title);
  }
  const isReversed = column.reverse !== undefined && sorted === column.reverse[0];
  const isSorted = sorted === column.sort || isReversed;
  const isFalling = Boolean(column.number || column.falling) !== isReversed;
  const next = sorted === column.sort && column.reverse ? column.reverse[0] : column.sort;
  const button = el("button", { type: "button", class: "sort", onclick: () => onSort(next) },
    column.title, el("span", { class: "arrow", "aria-hidden": "true" },
      isSorted ? (isFalling ? "▼" : "▲") : ""));
  const order = isFalling ? "descending" : "ascending";
  return el("th", { ...attributes, "aria-sort": isSorted ? order : null }, button);
}

function bodyCell(column, row, isFirst) {
  const classes = [column.number ? "number" : "", column.hide ? "hide" : "", column.class ?? ""];
  return el(isFirst ? "th" : "td", {
    class: classes.filter(Boolean).join(" ") || null,
    role: isFirst ? "rowheader" : "cell",
    scope: isFirst ? "row" : null,
    "data-label": column.title || column.label || null,
    // One element beside the label: on narrow screens both are in a grid.
  }, el("div", {}, column.cell(row)));
}

// On narrow screens rows become cards. That takes the table's meaning away from screen readers,
// unless roles are explicit.
function frame(caption, isCaptionShown, headers, body) {
  const text = el("caption", { class: isCaptionShown ? null : "unseen" }, caption);
  return el("div", { class: "table-frame" }, el("table", { role: "table" }, text,
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, headers)), body));
}

/** A table of rows that are there already. `empty` is shown if there are none. */
export function plainTable({ caption, columns, rows, empty = "Nothing.", captionShown = false, rowClass }) {
  if (!rows.length) return typeof empty === "string" ? emptyState(empty) : empty;
  const body = el("tbody", { role: "rowgroup" }, rows.map((row) =>
    el("tr", { role: "row", class: rowClass?.(row) ?? null },
      columns.map((column, index) => bodyCell(column, row, index === 0)))));
  return frame(caption, captionShown, columns.map((column) => headerCell(column)), body);
}

/**
 * A table of a list of the API. Its order, filters and page are in the screen's URL.
 *
 * `load(query, signal)` requests a page; `rows(page)` takes the rows from it. `filters`: objects
 * with `name`, `label`, and `options` as [value, text] pairs or else a text field. `sort` is the
 * default order. A search answers after a few seconds, also if there is more to look through: it goes
 * on by itself until the page is full. `empty(isFiltered)` gives what is shown without rows. `keyOf(row)` identifies a
 * row. `actions(selected)` gives buttons for chosen rows, which then have a box to tick.
 * `refresh_s`: how often it loads again. `prefix` is put before its names in the URL, where a
 * screen has several tables. `cursor` is the name of the API's parameter for the next page.
 *
 * Gives an element; its `reload()` loads the page again.
 */
export function serverTable(screen, spec) {
  const { columns, filters = [], prefix = "", limit = 50, cursor = "cursor" } = spec;
  const keyOf = spec.keyOf ?? ((row) => row.id ?? row.name);
  const earlier = [];
  const selected = new Map();
  let rows = [];
  let following = "";
  let loading = null;
  let isSearching = false;
  let orderInput = null;
  let page = Number(screen.query[`${prefix}page`] ?? 1) || 1;

  const status = el("p", { class: "table-status", role: "status" });
  const head = el("tr", { role: "row" });
  const body = el("tbody", { role: "rowgroup" });
  const table = el("table", { role: "table" }, el("caption", { class: "unseen" }, spec.caption),
    el("thead", { role: "rowgroup" }, head), body);
  const tableFrame = el("div", { class: "table-frame" }, table);
  const below = el("div", { class: "below" });
  const bar = el("div", { class: "selection-bar", hidden: true });
  const controls = filterControls();
  const pages = el("nav", { class: "pages", "aria-label": `Pages of ${spec.caption}` });
  const root = el("section", { class: "list", "aria-label": spec.caption },
    controls, bar, tableFrame, below, el("div", { class: "list-foot" }, status, pages));

  function value(key) {
    return screen.query[prefix + key] ?? "";
  }

  function change(changes, options) {
    const named = Object.fromEntries(
      Object.entries(changes).map(([key, each]) => [prefix + key, each]));
    screen.setQuery(named, options);
    load();
  }

  function isFiltered() {
    return filters.some((each) => value(each.name) !== "");
  }

  function filterControls() {
    const orders = columns.filter((column) => column.sort)
      .flatMap((column) => [[column.sort, column.title], ...(column.reverse ? [column.reverse] : [])]);
    if (!filters.length && !spec.tools && orders.length < 2) return null;
    // By name, and without names in the form: a field called `contains` would hide a method of it.
    const inputs = new Map();
    const form = el("form", { class: "filters", role: "search", "aria-label": `Filter ${spec.caption}` });
    form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
    for (const filter of filters) form.append(filterField(filter, apply, inputs));
    const entered = filters.some((each) => !each.options);
    if (filters.length) {
      const clear = el("button", { type: "button", class: "quiet", onclick: () => {
        for (const input of inputs.values()) input.value = "";
        apply();
      } }, "Clear");
      form.append(el("span", { class: "submit" },
        entered ? el("button", { type: "submit", class: "quiet" }, spec.submit ?? "Filter") : null, clear));
    }
    if (orders.length > 1) form.append(orderField(orders));
    if (spec.tools) form.append(el("span", { class: "tools" }, spec.tools));
    function apply() {
      const changes = { cursor: "", page: "" };
      for (const [filter, input] of inputs) changes[filter] = input.value.trim();
      earlier.length = 0;
      page = 1;
      change(changes);
    }
    return form;
  }

  /** On narrow screens, where rows are cards: there are no headers to press. */
  function orderField(orders) {
    const id = uniqueId("order");
    orderInput = el("select", { id, onchange: () => sortBy(orderInput.value) },
      orders.map(([order, title]) => el("option", { value: order }, title)));
    return el("div", { class: "field order" }, el("label", { for: id }, "Sorted by"), orderInput);
  }

  function sortBy(order) {
    earlier.length = 0;
    page = 1;
    change({ sort: order === spec.sort ? "" : order, cursor: "", page: "" });
  }

  function filterField(filter, apply, inputs) {
    const id = uniqueId("filter");
    let input;
    if (filter.options) {
      input = el("select", { id, onchange: apply }, filter.options.map(
        ([each, text]) => el("option", { value: each }, text)));
      input.value = value(filter.name);
    } else {
      input = el("input", { type: filter.type ?? "search", placeholder: filter.placeholder ?? null,
        autocomplete: "off", spellcheck: "false", id, value: value(filter.name) });
    }
    inputs.set(filter.name, input);
    return el("div", { class: `field ${filter.wide ? "wide" : ""}` },
      el("label", { for: id }, filter.label), input);
  }

  function query() {
    const asked = { ...spec.query, limit };
    if (columns.some((column) => column.sort)) asked.sort = value("sort") || spec.sort;
    for (const filter of filters) {
      if (value(filter.name) !== "") asked[filter.param ?? filter.name] = filter.read
        ? filter.read(value(filter.name)) : value(filter.name);
    }
    if (value("cursor")) asked[cursor] = value("cursor");
    return asked;
  }

  async function load({ quietly = false } = {}) {
    loading?.abort();
    const mine = loading = new AbortController();
    const signal = AbortSignal.any([screen.signal, mine.signal]);
    if (!quietly) root.setAttribute("aria-busy", "true");
    try {
      const answer = await spec.load(query(), signal);
      if (signal.aborted) return;
      rows = spec.rows(answer);
      following = answer.next ?? "";
      spec.loaded?.(answer);
      isSearching = false;
      if (!quietly) search(mine);
      else show();
    } catch (error) {
      if (signal.aborted) return;
      if (error.name === "AbortError") return;
      put(below, notice("bad", error.message));
      if (!quietly) { rows = []; following = ""; put(body); tableFrame.hidden = true; put(pages); put(status); }
    } finally {
      if (loading === mine) root.removeAttribute("aria-busy");
    }
  }

  /** Fills a page that is short although more follows, for a while, or until somebody stops it. */
  async function search(mine) {
    const signal = AbortSignal.any([screen.signal, mine.signal]);
    const until = Date.now() + SEARCH_MS;
    const isShort = () => following !== "" && rows.length < limit;
    const wasShort = isSearching = isShort();
    show();
    try {
      while (isSearching && isShort() && Date.now() < until) {
        const answer = await spec.load({ ...query(), [cursor]: following, limit: limit - rows.length }, signal);
        if (signal.aborted) return;
        const found = spec.rows(answer);
        rows = [...rows, ...found];
        following = answer.next ?? "";
        // Else nothing changes, and who is about to press the button keeps it.
        if (found.length) show();
      }
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      screen.fail(error);
    }
    isSearching = false;
    if (wasShort) show();
  }

  function searchButton() {
    const text = isSearching ? "Stop" : "Look further";
    return el("button", { type: "button", class: "quiet", onclick: () => {
      if (isSearching) isSearching = false;
      else search(loading);
    } }, text);
  }

  function showEmpty() {
    if (rows.length) put(below);
    else if (following) put(below, emptyState("None found so far.", isSearching ? "Searching on… " : "There is more to look through. ", searchButton()));
    else put(below, spec.empty?.(isFiltered()) ?? emptyState("Nothing found."));
  }

  function show() {
    const sorted = value("sort") || spec.sort;
    put(head, spec.actions ? el("th", { scope: "col", role: "columnheader", class: "tick" }, tickAll()) : null,
      columns.map((column) => headerCell(column, sorted, sortBy)));
    if (orderInput) orderInput.value = sorted;
    const focused = rememberFocus();
    put(body, rows.map((row) => tableRow(row)));
    focused?.();
    tableFrame.hidden = rows.length === 0;
    // Nothing to sort or to filter.
    if (controls && !spec.tools) controls.hidden = !rows.length && !following && page === 1 && !isFiltered();
    showEmpty();
    showPages();
    showSelection();
  }

  function tableRow(row) {
    const tick = spec.actions ? el("td", { class: "tick", role: "cell" }, tickOne(row)) : null;
    return el("tr", { role: "row", class: spec.rowClass?.(row) ?? null, "data-key": keyOf(row) },
      tick, columns.map((column, index) => bodyCell(column, row, index === 0)));
  }

  function tickOne(row) {
    const key = keyOf(row);
    return el("input", { type: "checkbox", checked: selected.has(key), "aria-label": `Select ${key}`,
      onchange: (event) => {
        if (event.target.checked) selected.set(key, row);
        else selected.delete(key);
        showSelection();
      } });
  }

  function tickAll() {
    return el("input", { type: "checkbox", "aria-label": "Select all on this page",
      checked: rows.length > 0 && rows.every((row) => selected.has(keyOf(row))),
      onchange: (event) => {
        for (const row of rows) {
          if (event.target.checked) selected.set(keyOf(row), row);
          else selected.delete(keyOf(row));
        }
        show();
      } });
  }

  function showSelection() {
    if (!spec.actions) return;
    bar.hidden = selected.size === 0;
    put(bar, el("span", {}, `${count(selected.size)} selected`), spec.actions([...selected.values()], () => {
      selected.clear();
      load();
    }), el("button", { type: "button", class: "quiet", onclick: () => { selected.clear(); show(); } }, "Clear selection"));
  }

  // Replacing rows would take the focus away from who uses the keyboard.
  function rememberFocus() {
    const row = document.activeElement?.closest?.("tr[data-key]");
    if (!row || !body.contains(row)) return null;
    const reachable = "a, button, input, summary";
    const index = [...row.querySelectorAll(reachable)].indexOf(document.activeElement);
    return () => {
      const again = [...body.children].find((each) => each.dataset.key === row.dataset.key);
      again?.querySelectorAll(reachable)[index]?.focus({ preventScroll: true });
    };
  }

  function showPages() {
    const button = (text, act, isPossible) =>
      el("button", { type: "button", class: "quiet", disabled: !isPossible, onclick: act }, text);
    const amount = rows.length ? `Page ${count(page)} · ${count(rows.length)} on this page` : "";
    put(status, amount, rows.length && isSearching ? [" · searching on… ", searchButton()] : null);
    put(pages,
      button("First", () => { earlier.length = 0; page = 1; change({ cursor: "", page: "" }); }, page > 1),
      button("Previous", () => {
        page -= 1;
        change({ cursor: earlier.pop(), page: page > 1 ? page : "" });
      }, earlier.length > 0),
      button("Next", () => {
        earlier.push(value("cursor"));
        page += 1;
        change({ cursor: following, page });
      }, following !== ""));
    pages.hidden = page === 1 && following === "";
  }

  root.reload = () => load({ quietly: true });
  load();
  if (spec.refresh_s) screen.every(spec.refresh_s * 1000, () => load({ quietly: true }));
  return root;
}
