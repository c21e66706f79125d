// Replays of dead letters and moves of messages: those that run, and the last that ended.

import * as api from "../api.js";
import { openDialog } from "../dialog.js";
import { el, emptyState } from "../dom.js";
import { count, name, rate, time } from "../format.js";
import { destinationLink } from "../links.js";
import { serverTable } from "../table.js";

const KINDS = { running: "info", done: "good", cancelled: "warn", failed: "bad" };

export async function show(screen) {
  screen.heading("Replays", { subtitle: "Dead letters that are sent again, and messages that are moved: those that run, and the last that ended." });
  const table = serverTable(screen, {
    caption: "Replays and moves",
    load: (query, signal) => api.get("/v1/dead/replays", query, signal),
    rows: (page) => page.replays,
    refresh_s: 2,
    sort: "newest",
    filters: [
      { name: "contains", label: "From or to contains", wide: true },
      { name: "state", label: "State", options: [["", "any"], ...Object.keys(KINDS).map((each) => [each, each])] },
    ],
    columns: [
      { title: "Replay", sort: "newest", falling: true, cell: (row) => count(row.id) },
      { title: "State", sort: "state", cell: (row) => [el("span", { class: `tag ${KINDS[row.state]}` }, row.state), row.dry_run ? [" ", el("span", { class: "tag" }, "dry run")] : null] },
      { title: "From", sort: "source", cell: (row) => destinationLink(row.source) },
      { title: "To", cell: (row) => (row.destination ? destinationLink(row.destination) : "where each came from") },
      { title: "Selected", sort: "matched", number: true, cell: (row) => count(row.matched) },
      { title: "Sent", sort: "replayed", number: true, cell: (row) => count(row.replayed) },
      { title: "Skipped", sort: "skipped", number: true, cell: (row) => count(row.skipped) },
      { title: "Rate", number: true, hide: true, cell: (row) => (row.rate ? rate(row.rate) : "no limit") },
      { title: "Started", class: "nowrap", cell: (row) => time(row.started) },
      { title: "By", class: "keep small", hide: true, cell: (row) => name(row.principal || "–") },
      { title: "Reason", hide: true, cell: (row) => name(row.error || "–") },
      { title: "", label: "Acts", cell: (row) => (row.state === "running" ? el("button", { type: "button", class: "danger", onclick: () => cancel(row) }, "Cancel…") : null) },
    ],
    empty: (isFiltered) => (isFiltered ? emptyState("No replay matches.", el("a", { href: "#/replays" }, "Show all")) : emptyState("There were no replays since the hub started.", "Replay dead letters from ", el("a", { href: "#/dead" }, "their screen"), ", or move messages from a queue's.")),
  });
  function cancel(row) {
    openDialog({
      title: `Cancel replay ${row.id}`,
      text: el("p", {}, "What it has sent stays sent; the rest stays where it is."),
      action: "Cancel the replay",
      danger: true,
      act: async () => {
        const ended = await api.del(api.apiPath("/v1/dead/replays", row.id));
        return `It has ended after ${count(ended.replayed)}.`;
      },
      done: () => table.reload(),
    });
  }
  screen.root.append(table);
}
