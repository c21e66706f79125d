// All queues: a page of them, sorted and filtered by the hub.

import * as api from "../api.js";
import { openDialog } from "../dialog.js";
import { el, emptyState } from "../dom.js";
import { count, duration, name, nameLink, rate, size } from "../format.js";
import { toDeadLetters, toQueue } from "../links.js";
import { go } from "../router.js";
import { serverTable } from "../table.js";

const STATES = [["", "any"], ["backlog", "with a backlog"], ["paused", "paused"], ["stopped", "stopped"], ["dead", "with dead letters"]];

export async function show(screen) {
  const mayCreate = screen.session.administer;
  screen.heading("Queues", {
    actions: mayCreate ? el("button", { type: "button", onclick: create }, "Create a queue") : null,
  });
  screen.root.append(serverTable(screen, {
    caption: "Queues",
    load: (query, signal) => api.get("/v1/queues", query, signal),
    rows: (page) => page.queues,
    sort: "name",
    keyOf: (row) => row.name,
    rowClass: (row) => (row.stopped ? "bad" : row.paused ? "warn" : null),
    filters: [
      { name: "contains", label: "Name contains", wide: true },
      { name: "state", label: "State", options: STATES },
    ],
    refresh_s: 5,
    columns: [
      { title: "Name", sort: "name", cell: (row) => [nameLink(toQueue(row.name), row.name), " ", stateTag(row)] },
      { title: "Messages", sort: "length", number: true, cell: (row) => count(row.length) },
      { title: "Size", sort: "size", number: true, hide: true, cell: (row) => size(row.size_bytes) },
      { title: "Oldest", sort: "age", number: true, cell: (row) => (row.oldest ? duration(row.oldest_age_s) : "–") },
      { title: "In", sort: "in", number: true, cell: (row) => rate(row.rates.accepted) },
      { title: "Out", sort: "out", number: true, cell: (row) => rate(row.rates.settled) },
      { title: "Consumers", sort: "consumers", number: true, cell: (row) => count(row.consumers) },
      { title: "Dead letters", sort: "dead", number: true, cell: (row) => (row.dead_letters
        ? el("a", { href: toDeadLetters(row.name), class: "bad-link" }, count(row.dead_letters)) : "0") },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No queue matches.", "Names are compared as they are, with capitals. ", el("a", { href: "#/queues" }, "Show all queues"))
      : emptyState("There are no queues yet.", "One is created by sending to it: ", el("code", {}, "crosswire pub queue/orders hello"), " or from a program.")),
  }));
}

/** What is unusual about a queue. */
export function stateTag(queue) {
  if (queue.stopped) return el("span", { class: "tag bad", title: queue.stopped }, "stopped");
  if (queue.paused) return el("span", { class: "tag warn" }, "paused");
  return null;
}

function create() {
  let made = null;
  openDialog({
    title: "Create a queue",
    fields: [{ name: "name", label: "Name", required: true, hint: "Levels are separated by slashes, such as shop/orders." }],
    action: "Create",
    act: async (values) => {
      const answer = await api.post("/v1/queues", { name: values.name.trim() });
      made = answer.name;
      return [answer.created ? "Created " : "There is already a queue ", name(answer.name), "."];
    },
    done: () => go(toQueue(made)),
  });
}
