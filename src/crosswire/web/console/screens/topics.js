// All topics: a page of them, sorted and filtered by the hub.

import * as api from "../api.js";
import { el, emptyState } from "../dom.js";
import { count, nameLink, rate } from "../format.js";
import { toTopic } from "../links.js";
import { href } from "../router.js";
import { publishDialog } from "../publish.js";
import { serverTable } from "../table.js";

export async function show(screen) {
  screen.heading("Topics", {
    actions: el("button", { type: "button", onclick: () => publishDialog("topic/", () => screen.reload()) }, "Publish…"),
    subtitle: "A topic gives each message to all who subscribed to it.",
  });
  screen.root.append(serverTable(screen, {
    caption: "Topics",
    load: (query, signal) => api.get("/v1/topics", query, signal),
    rows: (page) => page.topics,
    sort: "name",
    filters: [{ name: "contains", label: "Name contains", wide: true }],
    refresh_s: 5,
    columns: [
      { title: "Name", sort: "name", cell: (row) => [nameLink(toTopic(row.name), row.name), " ", row.durable ? null : el("span", { class: "tag" }, "not stored")] },
      { title: "Published", sort: "published", number: true, hide: true, cell: (row) => count(row.published) },
      { title: "In", sort: "in", number: true, cell: (row) => rate(row.rates.accepted) },
      { title: "Out", sort: "out", number: true, cell: (row) => rate(row.rates.delivered) },
      { title: "Subscribers", sort: "subscribers", number: true, class: "keep", cell: (row) => audience(row) },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No topic matches.", "Names are compared as they are, with capitals. ", el("a", { href: "#/topics" }, "Show all topics"))
      : emptyState("There are no topics yet.", "One is created by publishing or subscribing to it: ", el("code", {}, "crosswire sub topic/prices"))),
  }));
}

/** Connections, and named subscriptions: short, as numbers are kept on one line. */
function audience(row) {
  if (!row.subscription_count) return count(row.subscribers);
  const named = el("a", { href: href("/subscriptions", {}, { topic: row.name }) }, `${count(row.subscription_count)} named`);
  return row.subscribers ? [`${count(row.subscribers)}, `, named] : named;
}
