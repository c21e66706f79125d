// Named subscriptions: how far behind they are, in messages and in seconds.

import * as api from "../api.js";
import { el, emptyState } from "../dom.js";
import { count, duration, name, nameLink, rate } from "../format.js";
import { toDeadLetters, toSubscription, toTopic, toUser } from "../links.js";
import { serverTable } from "../table.js";

export async function show(screen) {
  screen.heading("Named subscriptions", {
    subtitle: "A named subscription keeps its position: what comes while its program is away waits for it.",
  });
  screen.root.append(subscriptionTable(screen));
}

/** The list, of all or of one `topic`. */
export function subscriptionTable(screen, { topic = "" } = {}) {
  return serverTable(screen, {
    caption: topic ? "Named subscriptions of this topic" : "Named subscriptions",
    load: (query, signal) => api.get("/v1/subscriptions", topic ? { ...query, topic } : query, signal),
    rows: (page) => page.subscriptions,
    sort: "name",
    keyOf: (row) => `${row.owner} ${row.name}`,
    rowClass: (row) => (row.stopped ? "bad" : row.lag_messages && !row.consumer_count ? "warn" : null),
    filters: [
      { name: "contains", label: "Name contains", wide: true },
      ...(topic ? [] : [{ name: "topic", label: "Gets messages of topic", placeholder: "prices" }]),
    ],
    refresh_s: 5,
    columns: [
      { title: "Name", sort: "name", cell: (row) => [nameLink(toSubscription(row.name, row.owner), row.name), " ", stateTag(row)] },
      { title: "Owner", hide: true, cell: (row) => ownerLink(row) },
      { title: "Topics", hide: true, cell: (row) => patternLink(row.pattern) },
      { title: "Lag in messages", number: true, cell: (row) => lagText(row) },
      { title: "Lag in time", sort: "lag", number: true, cell: (row) => (row.lag_messages ? duration(row.lag_s) : "–") },
      { title: "Out", sort: "out", number: true, cell: (row) => rate(row.rates.delivered) },
      { title: "Consumers", sort: "consumers", number: true, cell: (row) => count(row.consumer_count) },
      { title: "Dead letters", sort: "dead", number: true, cell: (row) => (row.dead_letters
        ? el("a", { href: toDeadLetters(row.dead_letter_queue), class: "bad-link" }, count(row.dead_letters)) : "0") },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No subscription matches.", "The topic is given without topic/. ", el("a", { href: "#/subscriptions" }, "Show all subscriptions"))
      : emptyState("There are no named subscriptions.", "A program makes one by subscribing with a name, as does ", el("code", {}, "crosswire sub topic/prices --name audit"), ".")),
  });
}

/** What is unusual about a subscription. */
export function stateTag(row) {
  if (row.stopped) return el("span", { class: "tag bad", title: row.stopped }, "stopped");
  if (!row.consumer_count) return el("span", { class: `tag ${row.lag_messages ? "warn" : ""}` }, "away");
  return null;
}

/** Its lag in messages; an estimate is marked. */
export function lagText(row) {
  return `${row.lag_is_exact ? "" : "≈ "}${count(row.lag_messages)}`;
}

export function ownerLink(row) {
  return row.owner ? nameLink(toUser(row.owner), row.owner) : el("span", { class: "muted" }, "nobody");
}

/** A link to the topic, or the pattern as it is if it stands for several. */
export function patternLink(pattern) {
  return /[+#]/.test(pattern) ? name(pattern) : nameLink(toTopic(pattern), pattern);
}
