// The dead letters of a queue: grouped by cause, and one by one.

import * as api from "../api.js";
import { causeFilter, purgeDialog, replayDialog } from "../dead_acts.js";
import { el, emptyState, notice, put } from "../dom.js";
import { ago, count, name, plural, size, time } from "../format.js";
import { connectionLink, messageLink, toDeadLetter, toDeadLetters, toQueue } from "../links.js";
import { BY_TIME, preview } from "../message_view.js";
import { href } from "../router.js";
import { serverTable } from "../table.js";

export async function show(screen) {
  const queue = screen.params.queue;
  const button = (text, act, danger = false) => el("button", { type: "button", class: danger ? "danger" : null, onclick: act }, text);
  const reload = () => screen.reload();
  const mayAct = screen.session.administer || queue.startsWith("@");
  screen.heading(el("span", {}, "Dead letters of ", name(queue)), {
    back: [["Dead letters", href("/dead")]],
    actions: [
      queue.startsWith("@") ? null : el("a", { class: "button", href: toQueue(queue) }, "The queue"),
      mayAct ? button("Replay all…", () => replayDialog(queue, { all: true }, reload)) : null,
      mayAct ? button("Delete all…", () => purgeDialog(queue, { all: true }, reload), true) : null,
    ],
  });
  // Only one of the two says that there is nothing.
  const causes = el("section", { class: "panel", hidden: true }, el("h2", {}, "By cause"));
  const note = el("div", {});
  causes.append(note, causesTable(screen, queue, mayAct, reload, causes, note));
  screen.root.append(causes, letters(screen, queue, mayAct));
}

function causesTable(screen, queue, mayAct, reload, panel, note) {
  const chosen = screen.query.cause;
  const act = (text, run, danger = false) => el("button", { type: "button", class: danger ? "danger" : "quiet", onclick: run }, text);
  return serverTable(screen, {
    caption: "Causes of these dead letters",
    prefix: "cause-",
    limit: 20,
    sort: "letters",
    keyOf: (row) => row.cause,
    load: async (query, signal) => {
      try {
        return await api.get("/v1/dead/causes", { queue, ...query }, signal);
      } catch (error) {
        if (error.status !== 404) throw error;
        return { causes: [], next: "", is_complete: true };
      }
    },
    rows: (page) => page.causes,
    loaded: (page) => {
      panel.hidden = page.causes.length === 0 && !screen.query["cause-cursor"];
      put(note, page.is_complete ? null : notice("info", `There are many: causes of the first ${plural(page.examined, "letter")} are shown.`),
        chosen === undefined ? null : el("p", {}, "Below: letters with one cause. ", el("a", { href: toDeadLetters(queue) }, "Show all letters")));
    },
    rowClass: (row) => (row.cause === chosen ? "chosen" : null),
    columns: [
      { title: "Cause", sort: "cause", cell: (row) => el("a", { href: toDeadLetters(queue, { cause: row.cause }), "aria-current": row.cause === chosen ? "true" : null }, name(row.cause || "(none given)")) },
      { title: "Letters", sort: "letters", number: true, cell: (row) => count(row.letters) },
      { title: "First", class: "nowrap", hide: true, cell: (row) => time(row.first) },
      { title: "Last", sort: "last", falling: true, class: "nowrap", cell: (row) => ago(row.last) },
      { title: "Example", cell: (row) => el("a", { href: toDeadLetter(queue, row.example), class: "id" }, String(row.example)) },
      mayAct ? { title: "", label: "Acts", class: "acts", cell: (row) => [
        act("Replay…", () => replayDialog(queue, { filter: causeFilter(row.cause) }, reload)), " ",
        act("Delete…", () => purgeDialog(queue, { filter: causeFilter(row.cause) }, reload), true)] } : null,
    ].filter(Boolean),
  });
}

function letters(screen, queue, mayAct) {
  const cause = screen.query.cause;
  const note = el("div", {});
  const table = serverTable(screen, {
    caption: "Dead letters",
    sort: "oldest",
    loaded: (page) => put(note, page.is_complete ? null : notice("info", "There are very many: only the first 100,000 are sorted. By time all are.")),
    load: (query, signal) => api.getExact("/v1/dead/letters", { queue, ...query }, signal),
    query: cause === undefined ? {} : { cause },
    rows: (page) => page.letters,
    limit: 25,
    filters: [{ name: "filter", label: "Property filter", placeholder: "price > 10", wide: true }],
    actions: mayAct ? (chosen, done) => {
      const ids = chosen.map((row) => row.id);
      return [
        el("button", { type: "button", onclick: () => replayDialog(queue, { ids }, () => { done(); screen.reload(); }) }, "Replay…"),
        el("button", { type: "button", class: "danger", onclick: () => purgeDialog(queue, { ids }, () => { done(); screen.reload(); }) }, "Delete…"),
      ];
    } : null,
    columns: [
      { title: "Letter", cell: (row) => el("a", { href: toDeadLetter(queue, row.id), class: "id" }, String(row.id)) },
      { title: "Cause", sort: "cause", class: "keep", cell: (row) => name(row.cause || "–") },
      { title: "Died", class: "nowrap", ...BY_TIME, cell: (row) => time(row.message.time) },
      { title: "Attempts", sort: "attempts", number: true, cell: (row) => count(row.attempts.length) },
      { title: "Was message", cell: (row) => (row.origin_id ? messageLink(row.origin_id) : "–") },
      { title: "Last consumer", hide: true, cell: (row) => connectionLink(row.attempts.at(-1)?.connection) },
      { title: "Payload", cell: (row) => preview(row.message) },
      { title: "Size", number: true, hide: true, cell: (row) => size(row.message.size_bytes) },
    ],
    empty: (isFiltered) => emptyState(isFiltered ? "No letter passes the filter." : "There are no dead letters here.",
      isFiltered ? "A filter names a property, an operator and a value: price > 10; name = acme. Text that looks like a number is in quotes." : "They were sent again or deleted, or none of its messages died."),
  });
  return el("div", {}, note, table);
}
