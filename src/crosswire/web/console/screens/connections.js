// Connections of all protocols but HTTP: those that are open, and the last that ended.

import * as api from "../api.js";
import { el, emptyState } from "../dom.js";
import { count, duration, name, nameLink, protocolName, rate, size, time, timeText, visible } from "../format.js";
import { connectionLink, toUser } from "../links.js";
import { href } from "../router.js";
import { serverTable } from "../table.js";

export const PROTOCOLS = [["", "any"], ...["emp", "emqp", "relink", "epoxy", "micromsg2"].map((each) => [each, protocolName(each)])];
const TABS = { open: "Open", closed: "Closed" };

export async function show(screen) {
  const tab = screen.query.tab in TABS ? screen.query.tab : "open";
  screen.heading("Connections", {
    subtitle: screen.session.observe || screen.session.open ? null : "Your own: seeing those of others needs the right to observe.",
  });
  screen.root.append(
    el("nav", { class: "tabs", "aria-label": "Open or closed" }, Object.entries(TABS).map(([key, text]) =>
      el("a", { href: href("/connections", {}, { tab: key === "open" ? "" : key }), "aria-current": key === tab ? "page" : null }, text))),
    tab === "open" ? openTable(screen) : closedTable(screen));
}

export function userLink(user) {
  return user ? nameLink(toUser(user), user) : el("span", { class: "muted" }, "none");
}

function openFor(since) {
  const seconds = Math.max(Math.round((Date.now() - new Date(since).getTime()) / 1000), 0);
  return el("time", { datetime: since, title: `since ${timeText(since, { day: true })} · ${since} (UTC)` }, duration(seconds));
}

function openTable(screen) {
  return serverTable(screen, {
    caption: "Open connections",
    load: (query, signal) => api.get("/v1/connections", query, signal),
    rows: (page) => page.connections,
    sort: "id",
    rowClass: (row) => (row.congested ? "warn" : null),
    filters: [
      { name: "contains", label: "Id, address or client contains", wide: true },
      { name: "protocol", label: "Protocol", options: PROTOCOLS },
      { name: "principal", label: "User" },
      { name: "state", label: "State", options: [["", "any"], ["congested", "congested"]] },
    ],
    refresh_s: 5,
    columns: [
      { title: "Connection", sort: "id", cell: (row) => [connectionLink(row.id), " ", row.congested ? el("span", { class: "tag warn" }, "congested") : null] },
      { title: "Protocol", cell: (row) => protocolName(row.protocol) },
      { title: "Client", class: "keep", cell: (row) => [row.client ? [name(row.client), " "] : null, el("span", { class: "muted" }, visible(row.address))] },
      { title: "User", class: "keep small", cell: (row) => userLink(row.principal) },
      { title: "Open for", sort: "age", number: true, hide: true, cell: (row) => openFor(row.since) },
      { title: "Messages in", sort: "in", number: true, cell: (row) => rate(row.accepted_per_s) },
      { title: "Messages out", sort: "out", number: true, cell: (row) => rate(row.delivered_per_s) },
      { title: "Received", sort: "received", number: true, hide: true, cell: (row) => size(row.received_bytes) },
      { title: "Sent", sort: "sent", number: true, hide: true, cell: (row) => size(row.sent_bytes) },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No connection matches.", el("a", { href: "#/connections" }, "Show all connections"))
      : emptyState("Nobody is connected.", "Connect a program, or try ", el("code", {}, "crosswire sub queue/orders"), ". ",
        el("a", { href: href("/connections", {}, { tab: "closed" }) }, "Show the last ones that ended"))),
  });
}

function closedTable(screen) {
  return serverTable(screen, {
    caption: "The last connections that ended",
    load: (query, signal) => api.get("/v1/connections/closed", query, signal),
    rows: (page) => page.connections,
    sort: "ended",
    filters: [
      { name: "contains", label: "Id, address, client or reason contains", wide: true },
      { name: "protocol", label: "Protocol", options: PROTOCOLS },
    ],
    refresh_s: 10,
    columns: [
      { title: "Connection", class: "nowrap", cell: (row) => connectionLink(row.id) },
      { title: "Ended", sort: "ended", number: true, cell: (row) => time(row.ended) },
      { title: "Reason", class: "keep", cell: (row) => name(row.reason) },
      { title: "Protocol", hide: true, cell: (row) => protocolName(row.protocol) },
      { title: "Client", class: "keep", cell: (row) => [row.client ? [name(row.client), " "] : null, el("span", { class: "muted" }, visible(row.address))] },
      { title: "User", hide: true, class: "keep small", cell: (row) => userLink(row.principal) },
      { title: "Lasted", sort: "lasted", number: true, cell: (row) => duration(lasted(row)) },
      { title: "Messages", number: true, hide: true, cell: (row) => `${count(row.accepted)} in, ${count(row.delivered)} out` },
      { title: "Received", sort: "received", number: true, hide: true, cell: (row) => size(row.received_bytes) },
      { title: "Sent", sort: "sent", number: true, hide: true, cell: (row) => size(row.sent_bytes) },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No connection matches.", el("a", { href: "#/connections?tab=closed" }, "Show all that ended"))
      : emptyState("No connection has ended since the hub was started.", "The last 1,000 are kept.")),
  });
}

/** How long a connection lasted, in seconds. */
export function lasted(row) {
  return Math.max((new Date(row.ended) - new Date(row.since)) / 1000, 0);
}
