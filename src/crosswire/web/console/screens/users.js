// Users of the configuration and their rights, without secrets.

import * as api from "../api.js";
import { el, emptyState } from "../dom.js";
import { count, name } from "../format.js";
import { href } from "../router.js";
import { serverTable } from "../table.js";

const HUB_RIGHTS = { administer: "bad", observe: "info", replicate: "info" };
const RIGHTS = { produce: "sends to", consume: "gets from", call: "calls", serve: "serves" };

export async function show(screen) {
  screen.heading("Users", {
    subtitle: screen.session.administer ? null : "Yourself: seeing others needs the right to administer.",
    actions: el("a", { class: "button", href: "#/access" }, "Why is this forbidden?"),
  });
  screen.root.append(serverTable(screen, {
    caption: "Users",
    load: (query, signal) => api.get("/v1/users", query, signal),
    rows: (page) => page.users,
    sort: "name",
    filters: [{ name: "contains", label: "Name contains", wide: true }],
    columns: [
      { title: "Name", sort: "name", cell: (row) => name(row.name) },
      { title: "Rights", cell: rights },
      { title: "Identified by", hide: true, cell: (row) => row.credentials.join(", ") || el("span", { class: "muted" }, "nothing: it can't sign in") },
      { title: "Connections", sort: "connections", number: true, cell: (row) => (row.connections
        ? el("a", { href: href("/connections", {}, { principal: row.name }) }, count(row.connections)) : "0") },
      { title: "", label: "Explain", class: "acts", cell: (row) => el("a", { href: href("/access", {}, { user: row.name }) }, "Explain a right") },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No user matches.", el("a", { href: "#/users" }, "Show all users"))
      : emptyState("There are no users.", "Everybody who can connect may do everything. Add ", el("code", {}, "[[users]]"), " to the configuration, with a hash from ", el("code", {}, "crosswire user token"), ".")),
  }));
}

function rights(row) {
  const tags = Object.keys(HUB_RIGHTS).filter((right) => row[right]).map((right) => [el("span", { class: `tag ${HUB_RIGHTS[right]}` }, right), " "]);
  const lines = Object.entries(RIGHTS).filter(([right]) => row[right].length).map(([right, text]) =>
    el("li", {}, `${text} `, row[right].map((pattern, index) => [index ? ", " : null, el("code", {}, name(pattern))])));
  if (!tags.length && !lines.length) return el("span", { class: "muted" }, "none");
  return [tags, lines.length ? el("ul", { class: "plain-list" }, lines) : null];
}
