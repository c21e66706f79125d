// Queues and named subscriptions that have dead letters.

import * as api from "../api.js";
import { el, emptyState } from "../dom.js";
import { count, nameLink, size } from "../format.js";
import { toDeadLetters, toQueue } from "../links.js";
import { serverTable } from "../table.js";

export async function show(screen) {
  screen.heading("Dead letters", {
    subtitle: "Messages that were refused or lost too often. Find the cause, edit them, send them again.",
    actions: el("a", { class: "button", href: "#/replays" }, "Replays"),
  });
  screen.root.append(serverTable(screen, {
    caption: "Queues with dead letters",
    load: (query, signal) => api.get("/v1/dead", query, signal),
    rows: (page) => page.queues,
    sort: "name",
    keyOf: (row) => row.queue,
    refresh_s: 5,
    filters: [{ name: "contains", label: "Name contains", wide: true }],
    columns: [
      { title: "Queue or subscription", sort: "name", cell: (row) => nameLink(toDeadLetters(row.queue), row.queue) },
      { title: "Letters", sort: "length", number: true, cell: (row) => count(row.length) },
      { title: "Size", number: true, cell: (row) => size(row.size_bytes) },
      { title: "", label: "Queue", cell: (row) => (row.queue.startsWith("@") ? null : el("a", { href: toQueue(row.queue) }, "the queue")) },
    ],
    empty: (isFiltered) => (isFiltered ? emptyState("No queue with dead letters matches.", el("a", { href: "#/dead" }, "Show all"))
      : emptyState("There are no dead letters.", "A message becomes one when it was refused or lost as often as the policy of its queue allows.")),
  }));
}
