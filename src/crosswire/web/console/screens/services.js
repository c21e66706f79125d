// Services: calls, latencies and errors, and who serves them.

import * as api from "../api.js";
import { el, emptyState } from "../dom.js";
import { count, duration, name, plural, protocolName, rate } from "../format.js";
import { connectionLink, toSearch } from "../links.js";
import { serverTable } from "../table.js";

export async function show(screen) {
  screen.heading("Services", { subtitle: "Those that have a provider now. Latencies are those of the last minute." });
  screen.root.append(serverTable(screen, {
    caption: "Services",
    load: (query, signal) => api.get("/v1/services", query, signal),
    rows: (page) => page.services,
    sort: "name",
    rowClass: (row) => (row.errors_per_s ? "bad" : row.waiting ? "warn" : null),
    filters: [{ name: "contains", label: "Name contains", wide: true }],
    refresh_s: 5,
    columns: [
      { title: "Name", sort: "name", cell: (row) => el("a", { href: toSearch({ destination: `service/${row.name}` }), title: "search its calls" }, name(row.name)) },
      { title: "Calls", sort: "calls", number: true, cell: (row) => rate(row.calls_per_s) },
      { title: "p50", number: true, cell: (row) => (row.p50_s ? duration(row.p50_s) : "–") },
      { title: "p99", sort: "latency", number: true, cell: (row) => (row.p99_s ? duration(row.p99_s) : "–") },
      { title: "Errors", sort: "errors", number: true, cell: (row) => `${rate(row.errors_per_s)} (${count(row.failed)} of ${count(row.answered + row.failed)})` },
      { title: "In progress", number: true, hide: true, cell: (row) => count(row.calls) },
      { title: "Waiting", sort: "waiting", number: true, cell: (row) => count(row.waiting) },
      { title: "Providers", class: "keep", cell: providers },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No service matches.", "A service is listed while it has a provider. ", el("a", { href: "#/services" }, "Show all services"))
      : emptyState("Nobody serves anything now.", "Start a program that provides a service, or try ", el("code", {}, "crosswire echo-service service/echo"), ".")),
  }));
}

function providers(row) {
  if (!row.providers.length) return el("span", { class: "muted" }, "hidden");
  const list = el("ul", { class: "plain-list" }, row.providers.map((each) => el("li", {}, connectionLink(each.connection), " ",
    el("span", { class: "muted" }, `${protocolName(each.protocol)}${each.principal ? ", " : ""}`, each.principal ? name(each.principal) : null,
      `, ${plural(each.calls, "call")} in progress, takes ${count(each.free)} more`))));
  const more = row.provider_count - row.providers.length;
  if (more) list.append(el("li", { class: "muted" }, `and ${count(more)} more`));
  if (row.provider_count <= 2) return list;
  return el("details", {}, el("summary", {}, plural(row.provider_count, "provider")), list);
}
